"""The loops that run a decoder's blocks, a turn at a time, over the banks their weights are stored in.

Entry points: `run_segment`, `run_cached_segment`, and what all blocks share, `rotary_of` and `whole_surroundings`. A
block is a function of (x, its stored weights, its window of a cache, its number) that gives x, the window and what its
router said.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dew.arrays import Array, Float, Int
from dew.kernels.dropout import Dropout
from dew.nn.backbones.banks import Segment
from dew.nn.block import RESIDUAL_NAMES, LayerSpec, Surroundings
from dew.nn.cache import Cache
from dew.nn.masks import causal_visibility, document_starts
from dew.nn.rope import RotarySpec, Tables, rotary_tables
from dew.nn.router import Routing
from dew.nn.sharding import constrain


def rotary_of(layers: tuple[LayerSpec, ...], positions: Int[Array, "B T"]) -> dict[tuple[RotarySpec, int], Tables]:
    """Compute the rotary tables once for all layers that share them.

    Args:
        layers: The layers.
        positions: Position of each token in its document.

    Returns:
        The tables, by rotary spec and rotated width.
    """
    keys = {(spec.mixer.rotary, spec.mixer.rotary_dim) for spec in layers if spec.mixer.rotary}
    return {key: rotary_tables(key[0], key[1], positions) for key in keys}


def whole_surroundings(
    num_tokens: int, segment_ids: Any, counted: Any = None, dropout: Dropout | None = None
) -> Surroundings:
    """Say what blocks need to know of whole sequences.

    Args:
        num_tokens: Their length.
        segment_ids: Document number of each token, 0 for padding; None means one document a row.
        counted: Weight of each token in the statistics of routers.
        dropout: What training drops; None where nothing is.
    """
    starts = document_starts(segment_ids)
    return Surroundings(
        causal_visibility(num_tokens, segment_ids),
        starts=starts,
        is_token=None if segment_ids is None else jnp.asarray(segment_ids) > 0,
        counted=counted,
        documents=None if starts is None else jnp.cumsum(starts, axis=1, dtype=jnp.int32),
        dropout=dropout,
    )


def run_segment(
    segment: Segment,
    blocks: list[Callable[..., Any]],
    weights: list[Any],
    x: Float[Array, "B T D"],
    numbers: list[Any],
) -> tuple[Float[Array, "B T D"], list[Routing | None]]:
    """Run a segment's blocks on whole sequences, a loop where its banks hold several layers.

    Args:
        segment: Which layers.
        blocks: The block of each run.
        weights: The stored weights of each run.
        x: What the first block reads.
        numbers: As `layer_numbers` gives them.

    Returns:
        What the last block gives, and what the routers of each run say.
    """

    def turn(x: Array, of_turn: tuple[list[Any], list[Any]]) -> tuple[Array, list[Any]]:
        said = []
        for block, own, number in zip(blocks, *of_turn, strict=True):
            x, _, own_routing = block(x, own, number=number)
            said.append(own_routing)
        return x, said

    given = (weights, numbers)
    x, said = jax.lax.scan(turn, x, given) if segment.repeats > 1 else turn(x, given)
    # The loss splits positions over tensor. Without this pin behind the loop, and its transpose on the way
    # back, GSPMD carries that split into every block and gathers weights and activations there.
    return constrain(x, RESIDUAL_NAMES), said


def layer_numbers(segment: Segment, dropout: Dropout | None) -> list[Any]:
    """Give the number in the model of each run's layers, which masks are drawn by; None where none are.

    Args:
        segment: Which layers.
        dropout: What training drops.
    """
    if dropout is None:
        return [None] * len(segment.runs)
    return [jnp.asarray(run if segment.repeats > 1 else run[0]) for run in segment.runs]


def run_cached_segment(
    segment: Segment,
    blocks: list[Callable[..., Any]],
    weights: list[Any],
    places: dict[int, tuple[int, int]],
    x: Float[Array, "B T D"],
    cache: Cache,
) -> tuple[Float[Array, "B T D"], Cache]:
    """Run a segment's blocks on new tokens.

    Args:
        segment: Which layers.
        blocks: The block of each run.
        weights: The stored weights of each run.
        places: The bank of the cache, and the place in it, of each layer.
        x: What the first block reads.
        cache: What the layers keep; its index is that of the first new token, before and after.

    Returns:
        What the last block gives, and the cache with what the new tokens left in these layers.
    """

    def turn(carry: Any, turn_weights: Any) -> tuple[Any, None]:
        x, banks = carry
        number, weights = turn_weights
        for run, block, own in zip(segment.runs, blocks, weights, strict=True):
            bank, place = places[run[0]]
            step = places[run[-1]][1] - place
            layer = place + (number * (step // (len(run) - 1)) if len(run) > 1 else 0)
            x, window, _ = block(x, own, banks[bank].window(layer, cache.index))
            banks = (*banks[:bank], window.bank, *banks[bank + 1 :])
        return (x, banks), None

    carry = (x, tuple(cache.banks))
    if segment.repeats > 1:
        (x, banks), _ = jax.lax.scan(turn, carry, (jnp.arange(segment.repeats), weights))
    else:
        (x, banks), _ = turn(carry, (0, weights))
    return x, cache.replace(banks=banks)


def by_layer(run: tuple[int, ...], routing: Routing | None, *, is_stacked: bool) -> dict[int, Routing]:
    """Give each layer of a run what its router said.

    Args:
        run: The layers.
        routing: What they said; None where they have no routers.
        is_stacked: Whether its leaves are `[layers, ...]`.
    """
    if routing is None:
        return {}
    if not is_stacked:
        return {run[0]: routing}
    return {layer: jax.tree.map(lambda leaf, place=place: leaf[place], routing) for place, layer in enumerate(run)}
