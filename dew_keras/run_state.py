"""What a run carries beside its weights, as named host arrays, and back into a training state.

Entry points: `run_arrays` and `run_facts` to write, `read_run` and `SavedRun.onto` to read.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dew.placement.processes import host_value
from dew.placement.stacks import StackView
from dew.training.state import TrainState
from dew_keras.layer_arrays import host_layers, layer_shapes, onto, place_like
from dew_keras.progress import Cursor, Progress, named_sums, sums_of
from dew_keras.weights_file import ArrayFile, DamagedFileError

COUNTERS = ("step", "microstep", "updates", "key")
PLACE = ("epoch", "batch", "first")
GROUPS = ("variables", "optimizer", "training", "window", "sums", "carry")


def run_arrays(state: TrainState, view: StackView, progress: Progress | None) -> Iterator[tuple[str, np.ndarray]]:
    """Copy what a weights file holds beside the variables to the host; all processes consume it together.

    Args:
        state: A state between two steps.
        view: How it stores layers.
        progress: Where the running fit is, or None.

    Yields:
        Names and arrays: the optimizer's state, the counters and the root random key, the sums of an open
        accumulation window, and the sums behind the running logs.
    """
    for name, value in host_layers(state.opt_state, view):
        yield f"optimizer/{name}", value
    for name, value in host_layers({name: getattr(state, name) for name in COUNTERS}, view):
        yield f"training/{name}", value
    if int(state.microstep):
        window = {"gradients": state.accumulator.gradients, "loss": state.accumulator.loss}
        for name, value in host_layers(window, view):
            yield f"window/{name}", value
    if progress is not None and progress.is_begun:
        for name, value in named_sums(progress.sums()).items():
            yield f"sums/{name}", value
        for index, value in enumerate(state.carry or ()):
            yield f"carry/{index}", host_value(value)


def run_facts(accumulation: int, seed: int, progress: Progress | None) -> dict[str, Any]:
    """Describe a run in JSON values.

    Args:
        accumulation: Batches per update.
        seed: What arrays are shuffled by.
        progress: Where the running fit is, or None.
    """
    facts: dict[str, Any] = {"accumulation": accumulation, "seed": seed}
    if progress is not None and progress.is_begun:
        facts["cursor"] = _place(progress)
    return facts


def _place(where: Progress | Cursor) -> dict[str, Any]:
    return {name: getattr(where, name) for name in PLACE} | {"order": dict(where.order)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A run as a file holds it.

    Attributes:
        title: The file, for messages.
        optimizer: The optimizer's state by per-layer name.
        counters: Counters and the root random key by field of `TrainState`.
        window: Sums of the open accumulation window; empty between windows.
        accumulation: Batches per update.
        seed: What arrays are shuffled by.
        cursor: Where its fit was, or None between fits.
        exact_variables: Variables that are stored in another dtype than the model kept when it read them.
        skipped: Variables that were left out, whose slots are left out too.
    """

    title: str
    optimizer: Mapping[str, np.ndarray]
    counters: Mapping[str, np.ndarray]
    window: Mapping[str, np.ndarray]
    accumulation: int
    seed: int
    cursor: Cursor | None
    exact_variables: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    skipped: frozenset[str] = frozenset()

    @property
    def learning_rates(self) -> list[float]:
        """The rates of the next update, one per part of a Keras optimizer, in order."""
        names = sorted(name for name in self.optimizer if f"/{name}".endswith("/hyperparams/learning_rate"))
        return [float(self.optimizer[name]) for name in names if self.optimizer[name].shape == ()]

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(value.nbytes for _, value in self.arrays())

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """List its arrays as a weights file names them."""
        sums = {} if self.cursor is None else named_sums(self.cursor.sums)
        carry = {} if self.cursor is None else {str(index): value for index, value in enumerate(self.cursor.carry)}
        groups = {"optimizer": self.optimizer, "training": self.counters, "window": self.window}
        groups |= {"sums": sums, "carry": carry}
        for group, arrays in groups.items():
            for name, value in arrays.items():
                yield f"{group}/{name}", value

    def facts(self) -> dict[str, Any]:
        """Describe it as `run_facts` does."""
        facts: dict[str, Any] = {"accumulation": self.accumulation, "seed": self.seed}
        if self.cursor is not None:
            facts["cursor"] = _place(self.cursor)
        return facts

    def matches(self, wanted: Mapping[str, Any]) -> bool:
        """Say whether the file holds the state of such an optimizer, and warn when it does not.

        Args:
            wanted: Shapes of the optimizer's state by per-layer name, as `layer_shapes` gives them.
        """
        wrong = [
            name for name in wanted if not self._is_skipped(name) and not _fits(self.optimizer.get(name), wanted[name])
        ]
        wrong += [name for name in self.optimizer if name not in wanted and not self.skipped]
        if wrong:
            warnings.warn(
                f"{self.title} holds the state of another optimizer: {len(wrong)} arrays differ, such as "
                f"{wrong[0]!r}. Only the weights were loaded; the optimizer starts anew.",
                stacklevel=4,
            )
        return not wrong

    def _is_skipped(self, slot: str) -> bool:
        return any(f"/{slot}".endswith(f"/{name.split('/', 1)[-1]}") for name in self.skipped)

    def onto(self, state: TrainState, view: StackView, accumulation: int) -> TrainState | None:
        """Continue a saved run in a state.

        Args:
            state: A placed state, its weights already those of the file, with an empty window where there is one.
            view: How it stores layers.
            accumulation: Batches per update from here.

        Returns:
            The state, or None, after a warning, when the file holds the state of another optimizer.
        """
        wanted = layer_shapes(state.opt_state, view)
        if not self.matches(wanted):
            return None
        if self.counters["key"].shape != state.key.shape:
            raise ValueError(
                f"{self.title} was saved under another random number generator: its key has the shape "
                f"{self.counters['key'].shape}, this one {state.key.shape}. Set jax_default_prng_impl as it was."
            )
        values = {
            name: value for name, value in self.optimizer.items() if name in wanted and not self._is_skipped(name)
        }
        counters = {name: place_like(self.counters[name], getattr(state, name)) for name in COUNTERS}
        state = state.replace(opt_state=onto(state.opt_state, values, view), **counters)
        if self.exact_variables:
            state = state.replace(variables=onto(state.variables, self.exact_variables, view))
        return self._with_window(state, view, accumulation)

    def _with_window(self, state: TrainState, view: StackView, accumulation: int) -> TrainState:
        if not int(self.counters["microstep"]):
            return state
        if accumulation != self.accumulation or self.skipped:
            warnings.warn(
                f"{self.title} was saved after {int(self.counters['microstep'])} of the {self.accumulation} batches of "
                f"an update, which this model cannot finish (accumulation={accumulation}); these batches are dropped.",
                stacklevel=2,
            )
            return state.replace(microstep=place_like(np.zeros((), np.int32), state.microstep))
        window = {"gradients": state.accumulator.gradients, "loss": state.accumulator.loss}
        shapes = layer_shapes(window, view)
        wrong = [name for name in shapes if not _fits(self.window.get(name), shapes[name])]
        if wrong:
            raise DamagedFileError(f"{self.title} is damaged: its open window lacks {wrong[0]!r}.")
        placed = onto(window, self.window, view)
        return state.replace(accumulator=state.accumulator.replace(gradients=placed["gradients"], loss=placed["loss"]))


def _fits(value: np.ndarray | None, wanted: Any) -> bool:
    return value is not None and value.shape == tuple(wanted.shape)


def read_run(file: ArrayFile) -> SavedRun | None:
    """Read the run that a weights file holds.

    Args:
        file: The file.

    Returns:
        The run; None when the file holds variables only.

    Raises:
        DamagedFileError: If a part is missing or of another form.
    """
    if not file.names("training"):
        return None
    found = {group: {name: file.read(f"{group}/{name}") for name in file.names(group)} for group in GROUPS[1:]}
    counters, facts = found["training"], file.facts()
    for name in COUNTERS[:3]:
        if name not in counters or counters[name].shape != () or counters[name].dtype.kind not in "iu":
            raise DamagedFileError(f"{file.title} is damaged: its counter {name!r} is missing or no integer.")
    accumulation, seed = facts.get("accumulation"), facts.get("seed")
    if "key" not in counters or not isinstance(accumulation, int) or accumulation < 1 or not isinstance(seed, int):
        raise DamagedFileError(f"{file.title} is damaged: its random key, accumulation or seed is missing.")
    return SavedRun(
        title=file.title,
        optimizer=found["optimizer"],
        counters=counters,
        window=found["window"],
        accumulation=accumulation,
        seed=seed,
        cursor=_cursor(facts.get("cursor"), found["sums"], found["carry"], file.title),
    )


def _cursor(facts: Any, sums: Mapping[str, np.ndarray], carry: Mapping[str, np.ndarray], title: str) -> Cursor | None:
    if facts is None:
        return None
    order = facts.get("order") if isinstance(facts, dict) else None
    if (
        not isinstance(order, dict)
        or not all(_is_count(facts.get(name)) for name in PLACE)
        or set(carry) != {str(index) for index in range(len(carry))}
        or not all(value is None or isinstance(value, int) for value in order.values())
    ):
        raise DamagedFileError(f"{title} is damaged: it does not say where its fit was.")
    return Cursor(
        title=title,
        **{name: facts[name] for name in PLACE},
        order=order,
        sums=sums_of(sums, title),
        carry=tuple(carry[str(index)] for index in range(len(carry))),
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
