"""A module as `compile` configured it, and its weights: unread, on a mesh, in a training state or in a running loop.

Entry point: `PlacedModel`. Masters and optimizer state are made when the first fit starts, so that a model that only
generates or evaluates holds its weights once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import unfreeze
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh

from dew.inference.decode_mesh import move_leaf_by_leaf
from dew.nn.backbones.staging import refuse_unscheduled
from dew.nn.exchange_report import check_row_length, takes_row_length
from dew.nn.router import is_balance_bias
from dew.objectives.language import LanguageModel
from dew.parallel.stages import microbatched_into, refuse_unstaged
from dew.placement.layout import Layout
from dew.placement.mesh import as_mesh, batch_divisor, microbatches_of
from dew.placement.partition import data_partition
from dew.placement.rules import STAGE
from dew.placement.stacks import StackView, stack_view
from dew.training.initialise import initialise
from dew.training.placing import plain
from dew.training.state import TrainState
from dew.tree import map_named
from dew_keras.calling import ModuleCall, cast_floats
from dew_keras.compiled import Compiled
from dew_keras.inputs import RowSharing
from dew_keras.kept_state import next_root_key
from dew_keras.layer_arrays import check_structure, place_like, shapes_of
from dew_keras.loop import FitRun
from dew_keras.optimizers import OptaxHandle
from dew_keras.presets import Preset
from dew_keras.waiting import WaitingRun

COMPUTING = {
    "remat": "configures language models; {} decides it in its own code, with flax.linen.remat.",
    "schedule": "orders the pipeline of a language model; {} has none.",
    "quantization": "configures language models; {} multiplies in its own code, with qwix.quantize_model for example.",
    "attention_impl": "names the attention kernel of a language model; {} attends in its own code.",
    "sequence_impl": "names the exchange of a language model's attention; {} attends in its own code.",
}
"""How a language model computes, by its field, and why other modules cannot be told."""


class PlacedModel:
    """A module as it is configured, and its weights on a mesh.

    Args:
        module: The Flax module as the user gave it.
        preset: The checkpoint it came from, or None.
        variables: Weights to start from, or None.
        seed: Seed of initial weights, dropout, shuffling and sampling.
    """

    def __init__(self, module: Any, *, preset: Preset | None, variables: Any, seed: int) -> None:
        self.given_module = module
        self.module = module
        self.preset = preset
        self.seed = seed
        self.compiled: Compiled | None = None
        self.layout = Layout()
        self._mesh_given: Any = None
        self.microbatches = 1
        self._compute: str | None = None
        self._storage: str | None = None
        self._master = "float32"
        self.given_variables = variables
        self._variables: Any = None
        self.state: TrainState | None = None
        self._run: FitRun | None = None
        self.waiting = WaitingRun()
        self._init: Any = None
        self.output_shapes: Any = None  # of one row, once a plain module was traced
        self._is_closed = False
        self._is_recompiled = False
        self._root_key: np.ndarray | None = None  # of the next state, where `compile` dropped one
        self._verbs: list[str] = []  # that run now, the innermost last

    @property
    def is_language_model(self) -> bool:
        """Whether the module has what the token loss and generation need."""
        return all(hasattr(self.given_module, name) for name in ("hidden_states", "head_weight", "vocab_size"))

    @property
    def is_pretrained(self) -> bool:
        """Whether the weights come from a checkpoint."""
        return self.preset is not None and self.preset.load_weights

    @functools.cached_property
    def call(self) -> ModuleCall:
        """How the module is called."""
        return self._call_of(self.module)

    def _call_of(self, module: Any) -> ModuleCall:
        # A language model computes in its own dtype, and declares that of its parameters.
        if self.is_language_model:
            return ModuleCall(module)
        return ModuleCall(module, compute_dtype=self._compute, variable_dtype=self._storage)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh; all devices on data until `compile` says otherwise."""
        return as_mesh(self._mesh_given)

    @property
    def view(self) -> StackView:
        """How the module stores its layers."""
        return stack_view(self.module)

    @property
    def sharing(self) -> RowSharing:
        """How batch rows meet the mesh. In a decoder of this library they never meet; in other modules they may."""
        return RowSharing(
            batch_divisor(self.mesh, self.microbatches), data_partition(self.mesh), fills=self.is_language_model
        )

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Enter the mesh and the rules that everything is traced under."""
        rules = nn.logical_axis_rules(self.layout.rules)
        with jax.set_mesh(self.mesh), rules, microbatched_into(self.microbatches):
            yield

    def check_row_length(self, length: int, *, packed: bool, train: bool) -> None:
        """Refuse rows of a length that some layer could not compute on the mesh, before anything is traced.

        Args:
            length: Positions of a row.
            packed: Whether rows hold documents or padding.
            train: Whether they are trained on.

        Raises:
            LayoutRefused: With lengths that every layer takes.
        """
        with nn.logical_axis_rules(self.layout.rules):
            check_row_length(self.module, self.mesh, length, packed=packed, train=train)

    def takes_row_length(self, length: int, *, train: bool) -> bool:
        """Say whether every layer computes packed or padded rows of a length on the mesh."""
        with nn.logical_axis_rules(self.layout.rules):
            return takes_row_length(self.module, self.mesh, length, packed=True, train=train)

    def configure(
        self,
        compiled: Compiled,
        *,
        mesh: Any,
        layout: Layout | None,
        computing: Mapping[str, Any],
        scored_by: str | None = None,
        precision: tuple[str | None, str | None],
    ) -> None:
        """Take over what `compile` decided; weights that are on a mesh move to the new one.

        Args:
            compiled: The settings.
            mesh: As `compile` takes it.
            layout: The rules; None takes the defaults.
            computing: How a language model computes, by the name of its field; None keeps the module's.
            scored_by: What scores in training in place of the token cross entropy, in words; None where that does.
            precision: Compute and storage dtypes; None means the checkpoint's.

        Raises:
            ValueError: If the mesh does not fit the devices, an option does not fit the module, or a built mesh has
                stages: it does not say how many microbatches they run.
            LayoutRefused: If the layout leaves too much whole on the mesh.
        """
        self._check_open()
        self.check_idle("compile")
        if layout is not None and not isinstance(layout, Layout):
            raise TypeError(f"layout must be a dew_keras.Layout or None. Received: layout={layout!r}")
        module = self._configured_module(computing, precision[0])
        new_mesh = as_mesh(mesh)
        if compiled.sequence_length is not None:
            with nn.logical_axis_rules((layout or Layout()).rules):
                check_row_length(module, new_mesh, compiled.sequence_length, train=False)
        refuse_unstaged(new_mesh.shape[STAGE], module)
        refuse_unscheduled(module, new_mesh.shape[STAGE], scored_by)
        microbatches = microbatches_of(mesh)
        # Built first: what is refused must leave the model as it was.
        fresh = PlacedModel(module, preset=self.preset, variables=None, seed=self.seed)
        fresh._mesh_given, fresh.layout = new_mesh, layout or Layout()
        fresh._compute, fresh._storage = precision
        moves = self.is_built and (self.mesh != new_mesh or self.layout != fresh.layout)
        # The declared names, where the module's shapes are known without data; else what plain shapes allow.
        known = fresh.abstract_variables() if self.is_language_model else shapes_of(self.variables)
        places = fresh.placements(known)
        if self.is_pretrained and not self.is_built:
            self._variables = fresh.load(None)
        keeps_moments = self.compiled is not None and self.compiled.optimizer.given is compiled.optimizer.given
        if self.state is not None and self.compiled is not None and self.compiled.accumulation != compiled.accumulation:
            # An open window of another length cannot be finished; its batches are dropped.
            self.state = self.state.replace(accumulator=None, microstep=jnp.zeros((), jnp.int32))
        self.module, self.compiled, self._mesh_given = module, compiled, new_mesh
        self.microbatches = microbatches
        self.layout, self._compute, self._storage = fresh.layout, *precision
        self._master = "bfloat16" if precision == ("bfloat16", "bfloat16") else "float32"
        self._init = None
        for name in ("mesh", "call"):
            self.__dict__.pop(name, None)
        if self.state is not None and not keeps_moments:
            self._root_key = next_root_key(self.state)
            self._variables, self.state = self.state.variables, None
        self._is_recompiled = True
        if moves:
            self._move(places)
        if self.is_built and self._storage is not None:
            self._set_variables({**self.variables, "params": self._stored(self.variables["params"])})
        if isinstance(compiled.optimizer.public, OptaxHandle):
            compiled.optimizer.public.current_state = lambda: None if self.current is None else self.current.opt_state

    def _stored(self, params: Any) -> Any:
        """Cast parameters to the storage dtype, but for balance biases, whose steps it would round away."""
        if not self.is_language_model:
            return cast_floats(params, self._storage)
        return map_named(lambda path, leaf: leaf if is_balance_bias(path) else cast_floats(leaf, self._storage), params)

    def _configured_module(self, computing: Mapping[str, Any], dtype: str | None) -> Any:
        module = self.given_module
        changes = {name: value for name, value in computing.items() if value is not None}
        if not self.is_language_model:
            for name, value in changes.items():
                said = COMPUTING[name].format(type(module).__name__)
                raise ValueError(f"{name} {said} Received: {name}={value!r}")
            return module
        if dtype == "float16":
            raise ValueError(
                "dtype='mixed_float16' is not available for language models: masked attention scores and large "
                "activations leave the range of float16. Use dtype='mixed_bfloat16', which needs no loss scale."
            )
        if dtype is not None:
            changes["dtype"] = dtype
        return module.clone(**changes) if changes else module

    @property
    def is_built(self) -> bool:
        """Whether there are weights on devices."""
        return self._variables is not None or self.state is not None or self._run is not None

    @property
    def current(self) -> TrainState | None:
        """The training state, from the running loop while there is one."""
        return self._run.loop.state if self._run is not None else self.state

    @property
    def variables(self) -> Any:
        """The weights on the mesh, or None. While a fit runs, the next step consumes them."""
        state = self.current
        return self._variables if state is None else state.variables

    def abstract_variables(self, example: Mapping[str, Any] | None = None) -> Any:
        """Compute the shapes of the variables, in the boxes that declare their logical names.

        Args:
            example: A batch, for modules whose shapes depend on it.
        """
        return self._traced_init(example)[1]

    def _traced_init(self, example: Mapping[str, Any] | None) -> tuple[Any, Any]:
        """Return the function that draws variables and their shapes; the module is traced once for all uses."""
        if self._init is None:
            with self.context():
                closed, found = jax.make_jaxpr(self._initialiser(example), return_shape=True)(jax.random.key(0))
            shapes, self.output_shapes = found
            self.layout.check_rules(shapes)
            structure, run = jax.tree.structure(found), jaxpr_as_fun(closed)
            self._init = lambda key: jax.tree.unflatten(structure, run(key))[0], shapes
        return self._init

    def _initialiser(self, example: Mapping[str, Any] | None) -> Any:
        if self.is_language_model:
            init = LanguageModel(self.module).init
            return lambda key: (init(key), None)
        if example is None:
            raise ValueError(
                f"{type(self.module).__name__} has no weights yet: their shapes follow from the data. Call fit, "
                "evaluate or predict first, or build(example_inputs)."
            )
        x = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), example["x"])

        return lambda key: self.call.init(key, x)

    def placements(self, abstract: Any) -> Any:
        """Say where each variable goes.

        Args:
            abstract: Shapes of the variables.

        Raises:
            LayoutRefused: If too much stays whole.
        """
        shardings = self.layout.shardings(self.mesh, abstract)
        self.layout.check(self.mesh, abstract, shardings, self.view)
        return shardings

    def load(self, example: Mapping[str, Any] | None) -> Any:
        """Return the weights on the mesh, reading or initialising them the first time.

        Args:
            example: A batch, for modules whose shapes depend on it.
        """
        self._check_open()
        if self.is_built:
            return self.variables
        if self.is_pretrained:
            assert self.preset is not None, "a pretrained engine has a preset"
            self._variables = self.preset.load(self.module, self.mesh, self.layout, self._storage)
            return self._variables
        given = None if self.given_variables is None else plain(unfreeze(self.given_variables))
        init: Any = None
        if given is not None and example is None and not self.is_language_model:
            abstract = shapes_of(given)  # data will show the module's own
        else:
            init, abstract = self._traced_init(example)
        shardings = self.placements(abstract)
        if given is not None:
            check_structure(given, plain(abstract))
            # A copy: training consumes the weights, and those given may be another model's.
            # Not may_alias=False, which still shares a buffer with an array that is whole on one of the devices.
            self._variables = jax.tree.map(lambda leaf, place: jnp.copy(jax.device_put(leaf, place)), given, shardings)
            if self._storage is not None and not self.is_language_model:
                self._variables["params"] = cast_floats(self._variables["params"], self._storage)
        else:
            key = jax.random.fold_in(jax.random.key(self.seed), 0)
            with self.context():
                self._variables = initialise(init, key, abstract, shardings, self.mesh)
        return self._variables

    def close(self) -> None:
        """Free the weights and the training state; everything that needs them is refused from here."""
        self.check_idle("close")
        for leaf in jax.tree.leaves((self._variables, self.state)):
            leaf.delete()
        self._variables = self.state = None
        self.waiting.take(None)
        self._is_closed = True

    def begin_with(self, other: PlacedModel) -> None:
        """Take over a copy of another model's weights, and its mesh and rules.

        Args:
            other: A model of the same module.

        Raises:
            RuntimeError: If its weights were freed.
        """
        other._check_open()
        self._mesh_given, self.layout = other._mesh_given, other.layout
        if other.is_built:
            self._variables = jax.tree.map(jnp.copy, other.variables)

    def go_on_with(self, other: PlacedModel) -> None:
        """Take over a copy of another model's training state, and the run that it read and did not go on with yet.

        Args:
            other: A model that is compiled alike.
        """
        if other.state is not None:
            self._variables = None  # freed before the state, which holds them too, is copied
            self.state = jax.tree.map(jnp.copy, other.state)
        self._root_key = other._root_key
        self.waiting.take(other.waiting.run)

    def check_idle(self, verb: str) -> None:
        """Refuse what would change the model under a verb that is running.

        Args:
            verb: What was called.

        Raises:
            RuntimeError: If a verb is running.
        """
        if self._verbs:
            running = self._verbs[-1]
            raise RuntimeError(
                f"{verb}() cannot be called from a callback while {running} runs. Call it when {running} has ended."
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("close() freed the weights of this model. Build it again, or load what was saved of it.")

    def assign(self, variables: Any) -> None:
        """Replace the weights, also between two steps of a running fit.

        Args:
            variables: Arrays in the structure of the current ones; they are moved to where those are.
        """
        self.waiting.forget_variables()
        self._set_variables(jax.tree.map(place_like, variables, self.variables))

    def replace_state(self, state: TrainState) -> None:
        """Replace the training state, also between two steps of a running fit.

        Args:
            state: A state in the structure of the current one.
        """
        if self._run is not None:
            self._run.loop.state = state
        else:
            self.state = state

    def _set_variables(self, variables: Any) -> None:
        if self.current is None:
            self._variables = variables
        else:
            self.replace_state(self.current.replace(variables=variables))

    def lend_variables(self, variables: Any) -> None:
        """Hold the weights at other places, even between two steps of a running fit, until they are brought back.

        Args:
            variables: Arrays in the structure of the current ones, with their values.
        """
        if self._run is not None:
            self._run.loop.lend(self._run.loop.state.replace(variables=variables))
        else:
            self._set_variables(variables)

    def _move(self, places: Any) -> None:
        """Bring the weights to the configured mesh, one of them twice at a time; moments follow at the next fit."""
        move_leaf_by_leaf(lambda: self.variables, self._set_variables, places)
