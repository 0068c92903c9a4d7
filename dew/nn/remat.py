"""What the backward pass keeps of a decoder block and what it computes again.

Entry points: `checked_remat`, `checkpointed`. Whatever the policy, a weight gathered for its use is gathered
again in the backward pass, never kept.
"""

from collections.abc import Callable
from typing import Any

import jax

from dew.nn.sharding import GATHERED, gathers_weights

REMAT_POLICIES: tuple[str, ...] = (
    "full",
    "minimal",
    "minimal_with_context",
    "save_dot_except_mlp",
    "save_dot_with_context_except_mlp",
    "save_dot_except_mlpwi",
    "save_qkv_proj",
    "save_out_proj",
    "minimal_offloaded",
    "qkv_proj_offloaded",
)
"""Names of the policies, most recomputation first."""

HONOURED: tuple[str | None, ...] = (None, "full")


def checked_remat(remat: Any) -> str | None:
    """Check a policy.

    Args:
        remat: None keeps every activation, "full" keeps the blocks' inputs only.

    Returns:
        The policy.

    Raises:
        ValueError: If it is unknown or not available.
    """
    if remat in HONOURED:
        return remat
    if remat in REMAT_POLICIES:
        raise ValueError(f"remat policy {remat!r} is not available yet; use None or 'full'")
    raise ValueError(f"remat must be None or 'full'. Received: remat={remat!r}")


def checkpointed(block: Callable[..., Any], remat: str | None, *, in_loop: bool) -> Callable[..., Any]:
    """Wrap a block so that the backward pass recomputes what the policy does not keep.

    Args:
        block: A pure function that gathers its weights inside.
        remat: A policy of `checked_remat`.
        in_loop: Whether a loop over layers surrounds the block; outside one, XLA must be kept from merging the
            recomputation with the first computation.

    Returns:
        The wrapped block; the block itself when everything may be kept.
    """
    if remat == "full":
        return jax.checkpoint(block, prevent_cse=not in_loop)
    if gathers_weights():
        return jax.checkpoint(block, prevent_cse=not in_loop, policy=_everything_but_gathered_weights)
    return block


_FREE_TO_REPEAT = frozenset(
    {
        *("sharding_constraint", "reshape", "transpose", "squeeze", "broadcast_in_dim", "convert_element_type"),
        *("mul", "sub", "logistic"),
    }
)
"""Primitives whose outputs are not kept. The first only rename or recast a value: keeping one could keep a gathered
weight in another shape (a four-layer step kept every attention kernel whole, as the matrix it is multiplied as). The
others fuse into what reads them; kept, they held four more arrays of the mlp's hidden width per layer."""


def _everything_but_gathered_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keep every value but a gathered weight, under its own name or as another view of it."""
    if primitive.name == "name":
        return params.get("name") != GATHERED
    return primitive.name not in _FREE_TO_REPEAT
