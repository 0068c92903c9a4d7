"""Which keys a query may read: causal order, packed documents, padded prompts.

Entry points: `causal_visibility` for whole sequences, `cached_visibility` for a cache; both describe the mask
for `dew.kernels.attention` without building it. `document_starts` is for mixers with a state.
"""

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
