"""The dew objects behind a model: objective, trainer and the passes of its verbs.

Entry point: `Engine`, which the verbs of `Model` share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dew.inference.decode_mesh import move_leaf_by_leaf
from dew.objectives.language import LanguageModel, check_token_ids
from dew.objectives.prediction import PREDICTION_LOSS, checked_weight
from dew.objectives.routing import ROUTING_METRICS
from dew.placement.partition import WholeBatch, shard_batch
from dew.training.optimizer import as_step_transformation
from dew.training.router_bias import with_router_biases
from dew.training.trainer import Trainer
from dew_keras.averages import lent
from dew_keras.callbacks import RunningLogs
from dew_keras.calling import ModuleCall
from dew_keras.compiled import Compiled
from dew_keras.custom_steps import STEPS, TRAINING_STEPS, CustomSteps, LatestLogs, overridden
from dew_keras.inputs import RowSharing
from dew_keras.interrupts import InterruptGate
from dew_keras.kept_state import conformed_state, windowed_state
from dew_keras.layer_arrays import place_like
from dew_keras.loop import FitRun, Pass
from dew_keras.losses import KerasObjective, bind_objective
from dew_keras.placed_model import PlacedModel
from dew_keras.presets import Preset
from dew_keras.restoring import RestoresRuns


class Engine(RestoresRuns, PlacedModel):
    """What trains, scores and predicts with a placed model.

    Args:
        module: The Flax module as the user gave it.
        preset: The checkpoint it came from, or None.
        variables: Weights to start from, or None.
        seed: Seed of initial weights, dropout, shuffling and sampling.
        model: The model, whose class may override pieces of a step.
    """

    def __init__(self, module: Any, *, preset: Preset | None, variables: Any, seed: int, model: Any) -> None:
        super().__init__(module, preset=preset, variables=variables, seed=seed)
        self._model = model
        self.overrides = overridden(model)
        self._objective: Any = None
        self._trainer: Trainer | None = None
        self._steps: CustomSteps | None = None

    def configure(self, compiled: Compiled, **settings: Any) -> None:
        """Take over what `compile` decided, as `PlacedModel.configure`; programs are made again.

        Args:
            compiled: The settings of training.
            settings: As `PlacedModel.configure`.

        Raises:
            ValueError: As there, and if an option does not fit what the model's class overrides.
        """
        self._check_overrides(compiled)
        scored_by = self._scored_by(compiled)
        self._check_prediction(compiled, scored_by)
        super().configure(compiled, scored_by=scored_by, **settings)
        self._trainer = self._objective = self._steps = None
        self.__dict__.pop("predictor", None)
        self._adopt_waiting()

    def _check_overrides(self, compiled: Compiled) -> None:
        own = sorted(self.overrides - {"predict_step"})
        if own and self.is_language_model and isinstance(compiled.loss, str) and compiled.loss == "auto":
            raise ValueError(
                f"{type(self._model).__name__} overrides {own}, which work on outputs and targets; loss='auto' never "
                "makes the logits of all tokens. Give compile() a Keras loss, such as "
                "SparseCategoricalCrossentropy(from_logits=True)."
            )
        if self._trains_by_own_step and compiled.accumulation > 1:
            raise ValueError(
                f"{type(self._model).__name__} overrides {own}; such a step applies its update itself. Use "
                "accumulation=1, and no gradient_accumulation_steps of the optimizer. Received: "
                f"accumulation={compiled.accumulation}"
            )

    def _check_prediction(self, compiled: Compiled, scored_by: str | None) -> None:
        """Refuse a loss under which layers that predict further tokens would only decay."""
        checked_weight(compiled.mtp_weight, self.module)
        if scored_by is not None and getattr(self.module, "prediction", None) is not None:
            raise ValueError(
                "Layers that predict further tokens are trained by loss='auto' alone, and this module has some. Use "
                "that, or a module without them: from_preset(prediction_layers=False) or clone(prediction=None). "
                f"Received: {scored_by}"
            )

    def _scored_by(self, compiled: Compiled) -> str | None:
        """Say what trains in place of the token cross entropy; None where that does, or nothing."""
        if own := sorted(self.overrides & {"compute_loss", "train_step"}):
            return f"{own[0]} of {type(self._model).__name__}"
        is_own = self.is_language_model and isinstance(compiled.loss, str) and compiled.loss == "auto"
        return None if is_own or compiled.loss is None else f"loss={compiled.loss!r}"

    @property
    def _trains_by_own_step(self) -> bool:
        return bool(self.overrides & set(TRAINING_STEPS))

    @property
    def sharing(self) -> RowSharing:
        """How the rows of training and scoring meet the mesh; in a step of the user's own they may in any model."""
        sharing = super().sharing
        fills = sharing.fills and self.overrides <= {"predict_step"} and not self._sows_router_losses
        return dataclasses.replace(sharing, fills=fills)

    @property
    def _sows_router_losses(self) -> bool:
        """Whether routers add their losses to a Keras loss: over all tokens that the module reads, filling too."""
        compiled = self.compiled
        has_own_loss = compiled is not None and isinstance(compiled.loss, str) and compiled.loss == "auto"
        return compiled is not None and not has_own_loss and getattr(self.module, "trains_routers", False)

    @property
    def predict_sharing(self) -> RowSharing:
        """How the rows of `predict` meet the mesh."""
        sharing = super().sharing
        return dataclasses.replace(sharing, fills=sharing.fills and "predict_step" not in self.overrides)

    @property
    def bound_objective(self) -> Any:
        """The objective, or None before a batch showed the outputs."""
        return self._objective

    def objective(self, example: Mapping[str, Any] | None) -> Any:
        """Return what is trained, binding losses and metrics to the outputs the first time.

        Args:
            example: A batch; not needed for a language model with its own loss.

        Raises:
            ValueError: If there is no loss, or it does not fit the outputs.
        """
        if self._objective is not None:
            return self._objective
        compiled = self.compiled
        assert compiled is not None, "verbs check that the model is compiled"
        if self.is_language_model and isinstance(compiled.loss, str) and compiled.loss == "auto":
            self._objective = LanguageModel(self._training_module(), compiled.mtp_weight)
            return self._objective
        if compiled.loss is None and not self.overrides & {"compute_loss", "train_step"}:
            raise ValueError(
                "You must give compile() a loss before fit() or evaluate(): a name such as 'mse', a keras.losses "
                "object, or a function of (y_true, y_pred). Received: loss=None"
            )
        if example is None:
            raise ValueError("The objective follows from the data. Call fit or evaluate first.")
        call = self._call_of(self._training_module())
        init, shapes = self._traced_init(example)
        if self.is_language_model:
            init = LanguageModel(self._training_module()).init  # in the dtype of the masters
            with self.context():
                shapes = jax.eval_shape(init, jax.random.key(0))
        self._objective = bind_objective(
            call,
            example,
            init=init,
            variables=shapes,
            outputs=self.output_shapes,
            loss=compiled.loss,
            loss_weights=compiled.loss_weights,
            metrics=compiled.metrics,
            weighted_metrics=compiled.weighted_metrics,
            loss_tracker=self._model._loss_tracker,
            compute_loss=self._model.compute_loss if "compute_loss" in self.overrides else None,
        )
        return self._objective

    @property
    def training_call(self) -> ModuleCall:
        """How the module is called in training, on its masters."""
        return self._call_of(self._training_module())

    @property
    def optimizer(self) -> Any:
        """The Keras optimizer, or a handle on an optax transformation; None before `compile`."""
        return None if self.compiled is None else self.compiled.optimizer.public

    def _training_module(self) -> Any:
        return self.module.clone(param_dtype=self._master) if self.is_language_model else self.module

    def trainer(self, example: Mapping[str, Any] | None) -> Trainer:
        """Return the engine's trainer for the compiled model.

        Args:
            example: A batch, for objectives that depend on it.
        """
        if self._trainer is None:
            compiled = self.compiled
            assert compiled is not None, "verbs check that the model is compiled"
            objective, transformation = self.objective(example), compiled.optimizer.build(self.view)
            if compiled.optimizer.accumulation > 1 and not isinstance(objective, LanguageModel):
                # Where the Keras optimizer accumulates, every batch of a Keras loss weighs the same.
                transformation = as_step_transformation(transformation)._replace(averages_batches=True)
            if self.overrides & set(STEPS):
                moved = with_router_biases(transformation, objective.module)
                self._steps = CustomSteps(self._model, moved, is_eager=compiled.is_eager)
            self._trainer = Trainer(
                objective,
                transformation,
                key=self.seed,
                mesh=self.mesh,
                layout=self.layout,
                microbatches=self.microbatches,
                accumulation=compiled.accumulation,
                step=self._steps.train if self._steps is not None and self._trains_by_own_step else None,
                carry=self._steps.fresh_metrics() if self._steps is not None and self._trains_by_own_step else None,
                is_eager=compiled.is_eager,
            )
        return self._trainer

    def scoring(self) -> Pass:
        """Begin a pass over held-out data; `trainer` was called before."""
        trainer, steps = self._trainer, self._steps
        assert trainer is not None, "the trainer is made first"
        if steps is None:
            return Pass(logs=RunningLogs(self.report), score=trainer.score, finish=lambda: None)
        metrics = steps.fresh_metrics()

        def score(variables: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal metrics
            placed = trainer.place_batch(batch, train=False)
            with trainer.context():
                logs, metrics = steps.test(variables, metrics, placed)
            return logs

        return Pass(logs=LatestLogs(), score=score, finish=lambda: steps.keep_metrics(metrics))

    def _training(self) -> Pass:
        """Begin a pass over the training data."""
        steps, run = self._steps, self._run
        assert self._trainer is not None, "called while a fit runs"
        assert run is not None, "called while a fit runs"
        if steps is None or not self._trains_by_own_step:
            return Pass(logs=RunningLogs(self.report), score=self._trainer.score, finish=lambda: None)
        run.loop.state = run.loop.state.replace(carry=run.progress.carry(steps.fresh_metrics()))
        return Pass(
            logs=LatestLogs(),
            score=self._trainer.score,
            finish=lambda: steps.keep_metrics(run.loop.state.carry),
        )

    def report(self, statistics: Mapping[str, Any]) -> dict[str, float]:
        """Turn pooled statistics into logs, sorted by name.

        Args:
            statistics: Host sums by name.
        """
        assert self.compiled is not None, "verbs check that the model is compiled"
        logs = self._objective.report(statistics)
        if isinstance(self._objective, LanguageModel):
            shown = ("loss", *self.compiled.language_metrics, *ROUTING_METRICS, PREDICTION_LOSS)
            logs = {name: value for name, value in logs.items() if name in shown}
        return dict(sorted(logs.items()))

    @contextlib.contextmanager
    def fitting(self, example: Mapping[str, Any] | None) -> Iterator[FitRun]:
        """Run a fit: make masters and optimizer state the first time, and keep what the loop leaves.

        Args:
            example: A batch, for objectives that depend on it.

        Yields:
            What the fit works with.
        """
        if self._run is not None:
            raise RuntimeError("fit() cannot be called while another fit of this model runs.")
        trainer = self.trainer(example)
        if example is not None and self._steps is None and isinstance(self._objective, KerasObjective):
            self._objective.check(example)  # as the first fit does by binding it, before any hook runs
        compiled = self.compiled
        assert compiled is not None, "verbs check that the model is compiled"
        with InterruptGate() as gate:
            if self.state is None:
                self.state, self._variables = trainer.place(self.load(example)), None  # the loop will consume them
                if self._root_key is not None:
                    key = place_like(self._root_key, self.state.key)
                    self.state, self._root_key = self.state.replace(key=key), None
            if self._is_recompiled:
                self._conform_state(trainer)
            self.state = state = windowed_state(self.state, trainer)
            self._is_recompiled = False
            saved, progress = self.waiting.begin()
            if saved is not None:
                state = self._continued(state, saved) or state
            self.waiting.take(None)
            loop = trainer.loop(state, nonfinite_limit=None)  # Keras goes on; TerminateOnNaN stops
            batches = loop.batches
            run = FitRun(
                loop=loop,
                gate=gate,
                optimizer=compiled.optimizer,
                training=self._training,
                scoring=self.scoring,
                accumulation=compiled.accumulation,
                per_execution=compiled.per_execution,
                finish=self._take_average,
                progress=progress,
            )
            try:
                self._run, self.state = run, None
                with self.running("fit"):
                    yield run
                loop.drain()
            finally:
                self.state, self._run = loop.state, None
                if loop.batches == batches:  # refused data does not use the place up
                    self.waiting.offer(progress.offered)
                self.show_iterations()

    def _conform_state(self, trainer: Trainer) -> None:
        """Fit a state that another trainer left to this one: its dtypes and its mesh, moments one by one."""
        assert self.state is not None, "fitting made one"
        self.state = conformed_state(self.state, trainer)
        move_leaf_by_leaf(self._moments, self._take_moments, trainer.shardings().opt_state)

    def _moments(self) -> Any:
        assert self.state is not None, "fitting made one"
        return self.state.opt_state

    def _take_moments(self, moments: Any) -> None:
        assert self.state is not None, "fitting made one"
        self.state = self.state.replace(opt_state=moments)

    def show_iterations(self) -> None:
        """Show on the user's optimizer how many updates were made."""
        if self.compiled is None:
            return
        saved = self.waiting.run
        if saved is None:
            self.compiled.optimizer.show(self.current)
        else:
            counters = saved.counters
            self.compiled.optimizer.show(
                None, updates=int(counters["updates"]), open_batches=int(counters["microstep"])
            )

    @contextlib.contextmanager
    def running(self, verb: str) -> Iterator[None]:
        """Let callbacks find on the Keras optimizer what they ask it for, and refuse a `compile` until the verb ends.

        Args:
            verb: The verb that runs, for the error.
        """
        self._verbs.append(verb)
        try:
            with lent(None if self.compiled is None else self.compiled.optimizer, self):
                yield
        finally:
            self._verbs.pop()

    def _take_average(self) -> None:
        assert self._run is not None, "called while a fit runs"
        self._run.loop.state = self._run.optimizer.finished(self._run.loop.state)

    @functools.cached_property
    def predictor(self) -> Any:
        """The compiled forward pass, outputs whole on every device."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        call = self.call

        def apply(variables: Any, x: Any) -> Any:
            return call.apply(variables, x, key=None, train=False)[0]

        if "predict_step" in self.overrides:
            if self.compiled is None:
                raise ValueError("You must call `compile()` before a predict_step of your own is run.")
            transformation = self.compiled.optimizer.build(self.view)
            apply = CustomSteps(self._model, transformation, is_eager=self._is_eager).predict
        return jax.jit(apply, out_shardings=whole)

    @property
    def _is_eager(self) -> bool:
        return self.compiled is not None and self.compiled.is_eager

    def predict(self, batch: Mapping[str, Any]) -> Any:
        """Start computing the outputs of a host batch.

        Args:
            batch: Holds `x`; a `WholeBatch` is not split.

        Raises:
            ValueError: If a language model is given ids outside its vocabulary, or rows longer than its context.
        """
        if self.is_language_model:
            ids = batch["x"]["tokens"] if isinstance(batch["x"], Mapping) else batch["x"]
            check_token_ids(self.module, ids, positions=np.shape(ids)[-1])
        x = {"x": batch["x"]}
        placed = shard_batch(
            self.mesh, WholeBatch(x) if isinstance(batch, WholeBatch) else x, microbatches=self.microbatches
        )
        with self.context(), jax.disable_jit(self._is_eager):
            return self.predictor(self.variables, placed["x"])
