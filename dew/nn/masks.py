"""Which keys a query may read: causal order, packed documents, padded prompts.

Entry points: `causal_visibility` for whole sequences, `cached_visibility` for a cache; both describe the mask
for `dew.kernels.attention` without building it. `limited` adds what one layer hides, `layer_limits` says which sizes
that leaves; `document_starts` is for mixers with a state.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dew.arrays import Array, Bool, Int
from dew.kernels.attention import Visibility, consecutive_visibility
from dew.nn.sharding import constrain


def causal_visibility(num_tokens: int, segment_ids: Int[Array, "B T"] | None = None) -> Visibility:
    """Let each token read itself and earlier tokens of its own document.

    Args:
        num_tokens: Length T of the rows.
        segment_ids: Document number of each token; 0 marks padding, which no document reads. None means one document.

    Returns:
        The visibility of T queries and T keys.
    """
    if segment_ids is not None:
        # Every device of a sequence axis compares whole rows: gathered here, once for all layers.
        segment_ids = constrain(jnp.asarray(segment_ids), ("activation_batch", None))
    return consecutive_visibility(num_tokens, num_tokens, query_segments=segment_ids, key_segments=segment_ids)


def cached_visibility(index: Int[Array, ""], num_tokens: int, valid: Bool[Array, "B S"]) -> Visibility:
    """Let new tokens read the tokens of a cache that are not padding, and each other in causal order.

    Args:
        index: Slot of the first new token.
        num_tokens: New tokens T.
        valid: Slots that hold a real token, the new ones included.

    Returns:
        The visibility of T queries and S keys.
    """
    ones = jnp.ones((1, num_tokens), jnp.int32)
    return consecutive_visibility(
        num_tokens, valid.shape[1], query_start=index, query_segments=ones, key_segments=valid.astype(jnp.int32)
    )


def document_starts(segment_ids: Int[Array, "B T"] | None) -> Bool[Array, "B T"] | None:
    """Mark the tokens whose document is another than the token's before them; None where all are one document."""
    if segment_ids is None:
        return None
    segment_ids = jnp.asarray(segment_ids)
    return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))


def limited(visibility: Visibility, *, window: int | None, chunk: int | None) -> Visibility:
    """Hide what a layer with a window or chunks does not read.

    Chunks count from the first token of a document, so that neither packing nor padding moves their borders.

    Args:
        visibility: What every layer hides.
        window: How many tokens a token reads, itself included; None means all before it.
        chunk: Length of the blocks of a document that a token reads its own of; None means all.

    Returns:
        The visibility of the layer.
    """
    segments = visibility.key_segments
    if chunk is None or segments is None:
        return dataclasses.replace(visibility, window=window, chunk=chunk)
    # A block of a document becomes a document of its own; the window tells kernels how far it can reach.
    starts = document_starts(segments)
    assert starts is not None, "there are documents"
    steps = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    first = jax.lax.cummax(jnp.where(starts, steps, 0), axis=1)
    blocks = segments * (segments.shape[1] // chunk + 1) + (steps - first) // chunk
    blocks = jnp.where(segments > 0, blocks, 0)
    own = blocks
    if visibility.query_segments is not segments:
        slots = jnp.broadcast_to(visibility.query_slots, (blocks.shape[0], visibility.query_slots.shape[1]))
        own = jnp.take_along_axis(blocks, slots, axis=1)
    reach, rest = layer_limits(window, chunk, in_documents=True)
    return dataclasses.replace(visibility, query_segments=own, key_segments=blocks, window=reach, chunk=rest)


def layer_limits(window: int | None, chunk: int | None, *, in_documents: bool) -> tuple[int | None, int | None]:
    """Give the window and the chunk that `limited` leaves: blocks of documents are documents, and none is longer.

    Args:
        window: How many tokens a token of the layer reads; None means all before it.
        chunk: Length of the blocks that it reads its own of; None means all.
        in_documents: Whether rows hold documents or padding.
    """
    if chunk is None or not in_documents:
        return window, chunk
    return chunk if window is None else min(window, chunk), None
