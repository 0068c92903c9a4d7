"""`Model`: Keras' verbs for any Flax module, and for language models text in and text out.

Entry points: `Model(module)`, `Model.from_preset(source)`. The verbs are thin; `engine.py` knows where weights are,
`loop.py` runs passes over data.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

from dew.data.text import Tokenizer
from dew.placement.layout import Layout
from dew.placement.processes import is_primary
from dew_keras.arguments import check_fit, check_hooks, limited_epochs, limited_steps
from dew_keras.arrays import host_tree
from dew_keras.callbacks import Hooks, LossTracker
from dew_keras.compile_config import compile_arguments, compile_config
from dew_keras.compiled import Compiled, resolve_compile, resolve_policy
from dew_keras.engine import Engine
from dew_keras.feeding import Feeder
from dew_keras.followers import quiet
from dew_keras.generation import run_generate
from dew_keras.inputs import WHOLE_BATCH, check_count
from dew_keras.loop import Validation, run_evaluate, run_fit, run_one_step, run_predict
from dew_keras.placed_model import COMPUTING
from dew_keras.presets import read_preset
from dew_keras.step_methods import StepMethods
from dew_keras.streams import SlicedSource, keras_source
from dew_keras.summary import summary_text
from dew_keras.weights import WeightVerbs


class Model(StepMethods, WeightVerbs):
    """A Flax module with Keras' verbs, on any mesh.

    Args:
        module: Any Flax Linen module.
        tokenizer: For language models that take and give text.
        variables: Weights to start from, in the module's structure; None draws them.
        seed: Seed of initial weights, dropout, shuffling and sampling.
        name: What `summary` calls the model.
    """

    def __init__(
        self,
        module: Any,
        tokenizer: Tokenizer | None = None,
        *,
        variables: Any = None,
        seed: int = 0,
        name: str | None = None,
        _preset: Any = None,
    ) -> None:
        if not hasattr(module, "apply") or not hasattr(module, "init"):
            text = "Model needs a Flax Linen module, or use Model.from_preset(source). Received: module="
            raise TypeError(f"{text}{module!r}")
        self._engine = Engine(module, preset=_preset, variables=variables, seed=seed, model=self)
        self._loss_tracker = LossTracker(self._engine)
        self.tokenizer = tokenizer
        self.name = name or type(module).__name__
        self.history: Any = None
        self.stop_training = self.stop_evaluating = self.stop_predicting = False
        self._initial_epoch: int | None = None
        self._generate_calls = 0

    @classmethod
    def from_preset(
        cls,
        preset: Any,
        load_weights: bool = True,
        *,
        revision: str | None = None,
        tokenizer: Tokenizer | None = None,
        prediction_layers: bool = True,
        dropout: bool = True,
        seed: int = 0,
    ) -> Model:
        """Describe a checkpoint as a model; its weights are read when a mesh is known.

        Args:
            preset: A directory, a `.gguf` file, `org/name[@revision]` or `hf://org/name[@revision]`.
            load_weights: Whether to take the weights; otherwise the model starts from random ones.
            revision: Branch, tag or commit of a repository.
            tokenizer: Taken in place of the checkpoint's own.
            prediction_layers: Whether to take layers that predict further tokens where there are any.
            dropout: Whether training drops at the rates of the checkpoint's config; False sets them to 0.
            seed: As `Model`.

        Raises:
            FileNotFoundError: If there is no such source.
            ValueError: If its config is not understood.
        """
        read = read_preset(preset, load_weights, revision, tokenizer, prediction_layers, dropout)
        return cls(read.described.module, read.described.tokenizer, seed=seed, name=read.name, _preset=read)

    # What the model holds ------------------------------------------------------------------------

    @property
    def module(self) -> Any:
        """The Flax module as it is compiled."""
        return self._engine.module

    @property
    def variables(self) -> Any:
        """The weights on the mesh, a tree of collections; None before they are read or initialised."""
        return self._engine.variables

    @property
    def mesh(self) -> Any:
        """The device mesh."""
        return self._engine.mesh

    @property
    def layout(self) -> Layout:
        """The rules of placement."""
        return self._engine.layout

    @property
    def trainer(self) -> Any:
        """The engine's trainer; for a plain module after the first batch showed the shapes."""
        self._check_compiled("trainer")
        return self._engine.trainer(None)

    @property
    def objective(self) -> Any:
        """What is trained; for a plain module after the first batch showed the shapes."""
        self._check_compiled("objective")
        return self._engine.objective(None)

    @property
    def optimizer(self) -> Any:
        """The Keras optimizer, or a handle with `learning_rate` and `iterations` for an optax transformation."""
        compiled = self._engine.compiled
        if compiled is None:
            return None
        self._engine.show_iterations()
        return compiled.optimizer.public

    @property
    def trainable(self) -> bool:
        """True: every parameter is trained.

        Raises:
            ValueError: If it is set to False.
        """
        return True

    @trainable.setter
    def trainable(self, value: bool) -> None:
        if not value:
            raise ValueError(
                "trainable=False is not available: a model's parameters are all trained. Freeze parts with an optax "
                "transformation, such as optax.multi_transform with optax.set_to_zero() for them; balance biases of "
                "routers stay with RouterTraining(bias_rate=0). Received: "
                f"trainable={value!r}"
            )

    @property
    def compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._engine.compiled is not None

    @property
    def built(self) -> bool:
        """Whether the weights are on devices."""
        return self._engine.is_built

    @property
    def metrics_names(self) -> list[str]:
        """Log keys, the loss first; complete once a batch showed the outputs."""
        compiled = self._check_compiled("metrics_names")
        if compiled.language_metrics:
            return ["loss", *compiled.language_metrics]
        return getattr(self._engine.bound_objective, "keys", ["loss"])

    # Verbs ---------------------------------------------------------------------------------------

    def compile(
        self,
        optimizer: Any = "auto",
        loss: Any = "auto",
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = "auto",
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: Any = "auto",
        auto_scale_loss: bool = True,
        *,
        mesh: Any = None,
        layout: Layout | None = None,
        remat: Any = None,
        schedule: str | None = None,
        quantization: str | None = None,
        attention_impl: str | None = None,
        sequence_impl: str | None = None,
        accumulation: int = 1,
        sampler: Any = "auto",
        dtype: Any = "auto",
        sequence_length: int | None = None,
        packing: bool = False,
        mtp_weight: float | None = None,
    ) -> None:
        """Choose optimizer, loss and metrics as in Keras, and where the model lives.

        Weights of a preset are read here, straight onto the mesh; a model that has weights moves them. The same
        optimizer object keeps its state.

        Args:
            optimizer: Of Keras or optax, or "auto": AdamW for language models, at 2e-5 if pretrained, else rmsprop.
            loss: What Keras takes, for outputs too, or "auto": a language model's token cross entropy, else none.
            loss_weights: Factors of several losses.
            metrics: Metrics that ignore sample weights.
            weighted_metrics: Metrics that use sample weights; "auto" is perplexity and token accuracy, or none.
            run_eagerly: Whether steps run operation by operation, so that prints and debuggers see values.
            steps_per_execution: Batches that run as one compiled program; hooks are called once for them.
            jit_compile: "auto" or True compile; False is `run_eagerly`.
            auto_scale_loss: Whether dtype="mixed_float16" puts the optimizer into a `LossScaleOptimizer`.
            mesh: A dict such as `{"fsdp": 4, "tensor": 2}`, a `MeshSpec`, a mesh, or None for all devices on data.
            layout: Rules of placement; None takes the defaults.
            remat: What the backward pass recomputes: None or "full".
            schedule: Order of the microbatches where the mesh has stages: "gpipe" or "1f1b"; None keeps the module's.
            quantization: 8-bit type of blocks' products, "int8" or "fp8" (extra `dew[quantization]`), or the module's.
            attention_impl: Attention kernel of whole rows, "auto" or its name; None keeps the module's.
            sequence_impl: Exchange of attention over split positions, "auto" or its name; None keeps the module's.
            accumulation: Batches per update.
            sampler: How `generate` draws: "greedy", "random", "top_k", "top_p", a strategy of `dew.inference`, or
                "auto" for what the checkpoint says, greedy when it says nothing.
            dtype: A Keras policy or its name: "float32", "bfloat16", "mixed_bfloat16", "mixed_float16". "auto" is
                the checkpoint's dtype with float32 masters, and for other modules what their code says.
            sequence_length: Positions of rows made from texts; None takes the longest text.
            packing: Whether texts share rows.
            mtp_weight: Weight of further tokens in loss="auto"; None is 0.1 where the module's layers predict them.

        Raises:
            ValueError: If a name means nothing, an option is not available, or the mesh does not fit the devices.
            ImportError: If an option needs an extra that is not installed.
            LayoutRefused: If the layout leaves too much whole on the mesh.
        """
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        engine = self._engine
        compiled = resolve_compile(
            arguments, is_language_model=engine.is_language_model, is_pretrained=engine.is_pretrained
        )
        compiled.check_length(getattr(self.module, "max_length", None))
        computing = {name: arguments[name] for name in COMPUTING}
        engine.configure(compiled, mesh=mesh, layout=layout, computing=computing, precision=resolve_policy(dtype))

    def get_compile_config(self) -> dict[str, Any] | None:
        """Describe what `compile` was given as JSON data; None before `compile`.

        Raises:
            ValueError: If an argument cannot be described: an optax transformation, a lambda.
        """
        compiled = self._engine.compiled
        return None if compiled is None else compile_config(compiled.arguments)

    def compile_from_config(self, config: Mapping[str, Any]) -> None:
        """Compile as `get_compile_config` describes it.

        Args:
            config: The description. Classes and functions of your own are found in a
                `keras.saving.custom_object_scope`.
        """
        self.compile(**compile_arguments(config))

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[Any, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        """Train, with Keras' arguments, hook order, logs and text.

        Args:
            x: Arrays, a PyDataset, a generator or an iterable of batches; for language models texts,
                `{"prompts": [...], "responses": [...]}`, chats, token rows, or an iterable of batches of these.
            y: Targets, with arrays.
            batch_size: Rows of a batch over all devices; None is 32.
            epochs: Number of the last epoch.
            verbose: 0 silent, 1 or "auto" a bar, 2 a line per epoch.
            callbacks: Keras callbacks.
            validation_split: Part of the rows, cut off the end, to validate on.
            validation_data: Data to validate on: (x, y), (x, y, sample_weight), or what x may be.
            shuffle: Whether arrays, and the batches of a PyDataset, are shuffled every epoch, by (seed, epoch).
            class_weight: Weight by class.
            sample_weight: Weights, with arrays.
            initial_epoch: Epoch to begin with.
            steps_per_epoch: Batches per epoch; the data goes on where the last epoch stopped.
            validation_steps: Batches of a validation pass.
            validation_batch_size: Rows of a validation batch; None is batch_size.
            validation_freq: Validate every so many epochs, or after the listed epochs, counted from 1.

        Returns:
            The History.

        Raises:
            ValueError: If the model is not compiled, has no loss, or the data does not fit.
        """
        check_fit(
            epochs=epochs,
            initial_epoch=initial_epoch,
            validation_split=validation_split,
            validation_freq=validation_freq,
            shuffle=shuffle,
        )
        epochs = limited_epochs(epochs)
        check_hooks(verbose, callbacks)
        check_count("steps_per_epoch", steps_per_epoch)
        check_count("validation_steps", validation_steps)
        check_count("validation_batch_size", validation_batch_size)
        feeder = Feeder(self._engine, self.tokenizer, self._check_compiled("fit"))
        split = validation_split if validation_data is None else 0.0  # as in Keras, data given comes first
        source, held_out, notes = feeder.training(
            x, y, sample_weight, class_weight, batch_size=batch_size, shuffle=shuffle, split=split
        )
        if validation_data is not None:
            held_out = validation_data
        validation = None
        if held_out is not None:
            held_out, more = feeder.validation(held_out, validation_batch_size, inherited=batch_size, like=source)
            notes += more
            validation_steps = limited_steps(validation_steps, held_out.steps)
            validation = Validation(source=held_out, steps=validation_steps, frequency=validation_freq)
        steps_per_epoch = limited_steps(steps_per_epoch, source.steps)
        if steps_per_epoch is not None:
            source = SlicedSource(source, steps_per_epoch)
        if verbose and is_primary():
            for note in notes:
                print(note)
        hooks = Hooks(callbacks, model=self, verbose=verbose, epochs=epochs, steps=source.steps, with_history=True)
        with quiet(not is_primary()), self._engine.fitting(source.example()) as run:
            try:
                run_fit(
                    run,
                    self,
                    source,
                    hooks,
                    epochs=epochs,
                    initial_epoch=initial_epoch,
                    validation=validation,
                )
            finally:
                self._initial_epoch = None
        return hooks.history

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Score data without training.

        Args:
            x: As `fit`.
            y: Targets, with arrays.
            batch_size: Rows of a batch; None is 32.
            verbose: As `fit`.
            sample_weight: Weights, with arrays.
            steps: Batches to score; None for all.
            callbacks: Keras callbacks.
            return_dict: Whether to return the logs by name.

        Returns:
            The loss, or a list of the loss and the metrics, or a dict.

        Raises:
            ValueError: If the model is not compiled, has no loss, or the data does not fit.
        """
        check_count("steps", steps)
        check_hooks(verbose, callbacks)
        compiled = self._check_compiled("evaluate")
        feeder = Feeder(self._engine, self.tokenizer, compiled)
        source, _ = feeder.held_out(x, y, sample_weight, batch_size=batch_size, what="evaluation")
        steps = limited_steps(steps, source.steps)
        hooks = Hooks(callbacks, model=self, verbose=verbose, steps=steps or source.steps)
        engine, example = self._engine, source.example()
        engine.trainer(example)
        engine.load(example)
        with engine.running("evaluate"):
            logs = run_evaluate(
                engine.scoring(),
                lambda: engine.variables,
                self,
                source,
                hooks,
                steps=steps,
                per_execution=compiled.per_execution,
            )
        return self._returned(logs, return_dict)

    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Train one step on all rows given.

        Args:
            x: As `fit`.
            y: Targets, with arrays.
            sample_weight: Weights, with arrays.
            class_weight: Weight by class.
            return_dict: Whether to return the logs by name.

        Returns:
            This batch's loss, or a list of the loss and the metrics, or a dict.

        Raises:
            ValueError: As `fit`.
        """
        feeder = Feeder(self._engine, self.tokenizer, self._check_compiled("train_on_batch"))
        source, _, _ = feeder.training(
            x, y, sample_weight, class_weight, batch_size=WHOLE_BATCH, shuffle=False, split=0.0
        )
        with self._engine.fitting(source.example()) as run:
            logs = run_one_step(run, next(source.open(0)))
        return self._returned(logs, return_dict)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """Score all rows given as one batch.

        Args:
            x: As `evaluate`.
            y: Targets, with arrays.
            sample_weight: Weights, with arrays.
            return_dict: Whether to return the logs by name.

        Returns:
            As `evaluate`.

        Raises:
            ValueError: As `evaluate`.
        """
        return self.evaluate(x, y, WHOLE_BATCH, 0, sample_weight, return_dict=return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Compute the outputs of all rows given as one batch.

        Args:
            x: Arrays.
        """
        return self.predict(x, WHOLE_BATCH, 0)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Compute the module's outputs for every row, in order.

        Args:
            x: Arrays, a PyDataset, a generator or an iterable; token ids for a language model.
            batch_size: Rows of a batch; None is 32.
            verbose: As `fit`.
            steps: Batches to compute; None for all.
            callbacks: Keras callbacks.

        Returns:
            Host arrays in the structure of the outputs, with exactly the rows given.

        Raises:
            ValueError: If the data does not fit.
        """
        check_count("steps", steps)
        check_hooks(verbose, callbacks)
        source = keras_source(x, batch_size=batch_size, sharing=self._engine.predict_sharing)
        steps = limited_steps(steps, source.steps)
        hooks = Hooks(callbacks, model=self, verbose=verbose, steps=steps or source.steps)
        self._engine.load(source.example())
        compiled = self._engine.compiled
        per_execution = 1 if compiled is None else compiled.per_execution
        with self._engine.running("predict"):
            return run_predict(self._engine.predict, self, source, hooks, steps=steps, per_execution=per_execution)

    def generate(
        self,
        inputs: Any,
        max_length: int | None = None,
        stop_token_ids: Any = "auto",
        strip_prompt: bool = False,
        *,
        max_new_tokens: int | None = None,
        sampler: Any = None,
        seed: int | None = None,
        mesh: Any = None,
    ) -> Any:
        """Continue prompts; works before `compile` too, on the default mesh.

        Args:
            inputs: A string, a chat (a list of role/content messages), a list of token ids, or a list of these.
            max_length: Most tokens of prompt and answer together.
            stop_token_ids: A row ends with the first of these; "auto" is what the checkpoint says, `[]` never stops.
            strip_prompt: Whether to leave the prompt out of the result.
            max_new_tokens: Most tokens of the answer. With neither limit: the checkpoint's, else 1,024 in all.
            sampler: How to draw; None takes what `compile` was given.
            seed: Makes the draw repeatable; None draws differently at every call.
            mesh: A mesh of the same devices to decode on, as `compile` takes it: the weights move there one after the
                other, and back when the answer is complete. None decodes where they are; weights that pipeline stages
                hold in parts move to fsdp meanwhile.

        Returns:
            The same kind as `inputs`: a string for a string, ids for ids; for a chat the reply's text.

        Raises:
            ValueError: If the model is no language model, a prompt does not fit the context, or limits contradict.
            TypeError: If the input is none of these.
            LayoutRefused: If the layout leaves too much whole on `mesh`.
        """
        if seed is None:
            self._generate_calls += 1
        return run_generate(
            self._engine,
            self.tokenizer,
            inputs,
            max_length=max_length,
            stop_token_ids=stop_token_ids,
            strip_prompt=strip_prompt,
            max_new_tokens=max_new_tokens,
            sampler=sampler,
            seed=seed,
            mesh=mesh,
            call=self._generate_calls,
        )

    def build(self, example: Any) -> None:
        """Make the weights of a module whose shapes follow from its input.

        Args:
            example: Inputs of at least one row.
        """
        self._engine.load({"x": host_tree(example)})

    def summary(
        self,
        line_length: int | None = None,
        positions: Any = None,
        print_fn: Callable[[str], Any] | None = None,
        expand_nested: bool = False,
        show_trainable: bool = False,
        layer_range: Any = None,
    ) -> None:
        """Print what the model is, what each mesh axis splits, what stays whole and why, and the bytes per device.

        Args:
            line_length: Accepted as in Keras; lines are as long as they need to be.
            positions: Accepted as in Keras.
            print_fn: Takes the text; None prints in the first process.
            expand_nested: Whether to list every weight.
            show_trainable: Accepted as in Keras; the counts say it.
            layer_range: Must be None.
        """
        if layer_range is not None:
            raise ValueError(f"layer_range is not available. Received: layer_range={layer_range!r}")
        text = summary_text(self._engine, self.name, with_leaves=expand_nested)
        if print_fn is not None:
            print_fn(text)
        elif is_primary():
            print(text)

    def close(self) -> None:
        """Free the device memory of the weights and the optimizer; the model cannot be used after."""
        self._engine.close()
        gc.collect()

    def _check_compiled(self, verb: str) -> Compiled:
        if self._engine.compiled is None:
            raise ValueError(f"You must call `compile()` before calling `{verb}()`.")
        return self._engine.compiled

    def _returned(self, logs: dict[str, Any], return_dict: bool) -> Any:
        """Hand logs back as Keras does: the loss, losses of outputs, metrics as given; a lone loss as a number."""
        if return_dict:
            return logs
        metrics = [name for name in self.metrics_names if name in logs and name != "loss"]
        rest = [name for name in logs if name != "loss" and name not in metrics]
        ordered = [logs[name] for name in ("loss", *rest, *metrics)]
        return ordered[0] if len(ordered) == 1 else ordered
