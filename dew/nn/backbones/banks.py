"""How a decoder's layers are grouped for storage and for its loops, and what each part of it starts as.

Entry points: `Segment`, `segments`, `whole_period`, `initial_weights`, `logical_names`. Layers that repeat with a
period (five local, one global, five local, ...) are a segment: one loop over the repeats, one bank per place in it.
"""

import dataclasses
import functools
import zlib
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dew.arrays import Array
from dew.nn.block import DecoderLayer, Surroundings
from dew.nn.embed import Embedding
from dew.nn.masks import causal_visibility
from dew.nn.prediction import PredictionLayer
from dew.nn.rope import rotary_tables
from dew.nn.sharding import without_mesh


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive layers that one loop runs.

    Attributes:
        first: Number of the first layer.
        period: Layers of one turn of the loop.
        repeats: Turns; 1 means a layer of its own, without a loop.
    """

    first: int
    period: int
    repeats: int

    @property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        """Layers stored together: for each place in the period, every layer in that place."""
        count = self.period * self.repeats
        return tuple(tuple(range(self.first + place, self.first + count, self.period)) for place in range(self.period))


@functools.lru_cache(maxsize=64)
def segments(layers: tuple[Hashable, ...], scan_layers: bool, bank_layers: int | None) -> tuple[Segment, ...]:
    """Group layers into loops.

    Layers that repeat as a whole are one loop, the only form that pipeline stages share out, even where a few blocks
    more are compiled. Others are grouped so that as few blocks as possible are; among equals early loops of a short
    period win.

    Args:
        layers: Spec of each layer.
        scan_layers: Whether like layers are stored in banks.
        bank_layers: Most layers of a bank; None means no bound.
    """
    if not scan_layers:
        return tuple(Segment(index, 1, 1) for index in range(len(layers)))
    period = whole_period(layers)
    if 1 < len(layers) // period <= (bank_layers or len(layers)):
        return (Segment(0, period, len(layers) // period),)
    # From the end: best[i] is the fewest compiled blocks for layers i and on, and the segment that begins there.
    best: list[tuple[int, Segment | None]] = [(0, None)] * (len(layers) + 1)
    for first in reversed(range(len(layers))):
        choices = [(1 + best[first + 1][0], Segment(first, 1, 1))]
        for period in range(1, (len(layers) - first) // 2 + 1):
            repeats = min(_repeats(layers, first, period), bank_layers or len(layers))
            if repeats > 1:
                choices.append((period + best[first + period * repeats][0], Segment(first, period, repeats)))
        best[first] = min(choices, key=_preference)
    found: list[Segment] = []
    while (place := sum(segment.period * segment.repeats for segment in found)) < len(layers):
        segment = best[place][1]
        assert segment is not None, "every layer begins a segment"
        found.append(segment)
    return tuple(found)


def whole_period(layers: tuple[Hashable, ...]) -> int:
    """Count the layers of the shortest pattern that the whole stack repeats; all of them where none repeats.

    Args:
        layers: Spec of each layer.
    """
    count = len(layers)
    repeating = (period for period in range(1, count) if count % period == 0 and layers[period:] == layers[:-period])
    return next(repeating, max(count, 1))


def _preference(choice: tuple[int, Segment]) -> tuple[int, ...]:
    compiled, segment = choice
    return compiled, segment.repeats == 1, segment.period, -segment.repeats


def _repeats(layers: tuple[Hashable, ...], first: int, period: int) -> int:
    """How often the `period` layers from `first` on come one after the other."""
    pattern, repeats = layers[first : first + period], 1
    while layers[first + repeats * period : first + (repeats + 1) * period] == pattern:
        repeats += 1
    return repeats


def bank_name(run: tuple[int, ...]) -> str:
    """Name what is stored for a run of layers: `layers_3` alone, `layers_0_29`, `layers_0_24_2` in steps of two."""
    step = run[1] - run[0] if len(run) > 1 else 0
    numbers = (run[0],) if not step else (run[0], run[-1]) if step == 1 else (run[0], run[-1], step)
    return "_".join(("layers", *map(str, numbers)))


def initial_weights(part: nn.Module, key: Array | None, name: str, layers: tuple[str, ...] | None) -> Any:
    """Draw a part's weights from the key and its logical name; a bank draws each of its layers so."""

    def one(number: Array) -> Any:
        assert key is not None, "Flax asks for initial values only where it has a params key"
        return _initialised(part, jax.random.fold_in(key, number))

    names = layers or (name,)
    numbers = jnp.array([zlib.crc32(layer.encode()) for layer in names], jnp.uint32)
    if layers is None:
        return one(numbers[0])
    stacked = jax.vmap(one)(numbers)
    return jax.tree.map(
        lambda box: box.replace(names=("layers", *box.names)),
        stacked,
        is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned),
    )


@functools.lru_cache(maxsize=64)
def logical_names(part: nn.Module) -> Any:
    """List the logical names a part's weights declare, as a tree of tuples."""
    with without_mesh():  # one token shows the names; no mesh has to split it
        boxes = jax.eval_shape(lambda: _initialised(part, jax.random.key(0)))
    return jax.tree.map(lambda box: box.names, boxes, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))


@functools.partial(jax.jit, static_argnums=0)
def _initialised(part: nn.Module, key: Array) -> Any:
    """Draw the weights of a part, on an example that a kernel named for its own calls may refuse.

    Compiled, so that equal parts, of one model or of several, are traced once.
    """
    if isinstance(part, DecoderLayer | PredictionLayer):
        part = part.clone(implementation="auto")
    return part.init(key, *_example_input(part))["params"]


def _example_input(part: nn.Module) -> tuple[Any, ...]:
    """Give the smallest input that reaches all weights of a part."""
    if isinstance(part, Embedding):
        return (jnp.zeros((1, 1), jnp.int32),)
    x = jnp.zeros((1, 1, part.features), jnp.float32)
    if not isinstance(part, DecoderLayer | PredictionLayer):
        return (x,)
    mixer = (part.spec if isinstance(part, DecoderLayer) else part.layer).mixer
    tables = rotary_tables(mixer.rotary, mixer.rotary_dim, jnp.zeros((1, 1), jnp.int32)) if mixer.rotary else None
    read = (x,) if isinstance(part, DecoderLayer) else (x, x)
    return *read, Surroundings(causal_visibility(1)), tables
