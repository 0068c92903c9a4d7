"""The state-space scan of Mamba-2 on one device, in chunks.

Entry points: `ssd` for whole sequences, `ssd_step` for one token, `time_steps` for the step sizes of both,
`remaining` and `read_state` for a state that is known later (https://arxiv.org/abs/2405.21060, section 6). In float32:
inside a chunk a masked product of the tokens, between chunks the state, which is all that the gradient keeps of it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dew.arrays import Array, Bool, Float, Shaped

CHUNK = 128
"""Tokens of a chunk: products inside it grow with its square, kept states with their number."""
BLOCK = 16
"""Tokens whose decays are summed one by one; chunks are multiples of it."""


def time_steps(
    raw: Float[Array, "B T N"], bias: Float[Array, " N"], *, low: float = 0.0, high: float = float("inf")
) -> Float[Array, "B T N"]:
    """Give each token's step size: the softplus of what was projected and a bias, within limits.

    Args:
        raw: The projection.
        bias: Added to it, per head.
        low: Smallest step.
        high: Largest step.
    """
    return jnp.clip(jax.nn.softplus(raw.astype(jnp.float32) + bias.astype(jnp.float32)), low, high)


def ssd(
    x: Float[Array, "B T N H"],
    dt: Float[Array, "B T N"],
    decay: Float[Array, " N"],
    b: Float[Array, "B T G P"],
    c: Float[Array, "B T G P"],
    *,
    skip: Float[Array, " N"] | None = None,
    starts: Bool[Array, "B T"] | None = None,
    initial_state: Float[Array, "B N H P"] | None = None,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N H P"]]:
    """Run state_t = exp(dt_t decay) state_(t-1) + dt_t x_t b_t^T, y_t = state_t c_t + skip x_t over a sequence.

    Head n reads group n // (N // G) of `b` and `c`. Forward, backward and what is computed again cost
    2 (4 C G P + 3 C N H + 7 N H P) operations a token.

    Args:
        x: Values of the tokens.
        dt: Step sizes, positive; a token with 0 leaves the state as it is.
        decay: Rate of each head, negative.
        b: What a token writes to the state.
        c: What a token reads from it.
        skip: Factor of a token's own value; None means 0.
        starts: Tokens that forget everything before them; None means none does.
        initial_state: The state before the first token; None means zero.
        chunk: Tokens that are computed at once.

    Returns:
        The outputs and the state after the last token, both float32.
    """
    B, T, N, H = x.shape
    G, P = b.shape[2:]
    assert N % G == 0, f"{N} heads cannot share {G} groups evenly"
    chunk = chunk_length(T, chunk)
    x, dt, b, c = (each.astype(jnp.float32) for each in (x, dt, b, c))
    documents = jnp.zeros((B, T), jnp.int32) if starts is None else jnp.cumsum(starts, axis=1, dtype=jnp.int32)
    grouped = x.reshape(B, T, G, N // G, H), dt.reshape(B, T, G, N // G), b, c
    state = jnp.zeros((B, N, H, P), jnp.float32) if initial_state is None else initial_state.astype(jnp.float32)
    carry = state.reshape(B, G, N // G, H, P), jnp.zeros(B, jnp.int32)
    chunks = (*(in_chunks(each, chunk) for each in grouped), in_chunks(documents, chunk, "edge"))
    body = functools.partial(computed_again(_chunk), decay.astype(jnp.float32).reshape(G, N // G))
    (state, _), y = jax.lax.scan(body, carry, chunks)
    y = y.swapaxes(0, 1).reshape(B, -1, N, H)[:, :T]
    if skip is not None:
        y = y + skip.astype(jnp.float32)[:, None] * x
    return y, state.reshape(B, N, H, P)


def chunk_length(length: int, chunk: int) -> int:
    """Give the tokens of a chunk: those named or all there are, filled up to whole blocks.

    Args:
        length: Tokens of a row.
        chunk: Tokens that may be computed at once.
    """
    return min(-(-chunk // BLOCK), -(-length // BLOCK)) * BLOCK


def in_chunks(array: Shaped[Array, "B T ..."], chunk: int, mode: str = "constant") -> Shaped[Array, "chunks B C ..."]:
    """Cut the tokens of [B, T, ...] into [chunks, B, C, ...]; a padded token neither decays nor writes.

    Args:
        array: What the tokens have.
        chunk: Tokens of a chunk.
        mode: What the last chunk is filled with, as `jnp.pad` says it.
    """
    B, T = array.shape[:2]
    room = [(0, 0), (0, -T % chunk), *[(0, 0)] * (array.ndim - 2)]
    padded = jnp.pad(array, room, mode=mode)
    return padded.reshape(B, -1, chunk, *array.shape[2:]).swapaxes(0, 1)


def computed_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the gradient of a function keep its arguments alone, whatever a surrounding `jax.checkpoint` keeps.

    The policy of one around a layer reaches into a `jax.checkpoint` inside: one that keeps every value but gathered
    weights kept all that a chunk computes.

    Args:
        function: A function of arrays, all of them arguments.
    """
    again = jax.custom_vjp(function)
    again.defvjp(
        lambda *arguments: (function(*arguments), arguments),
        lambda arguments, cotangents: jax.vjp(function, *arguments)[1](cotangents),
    )
    return again


def _chunk(decay, carry, inputs):
    """Compute one chunk from the state before it; heads are [G, R], groups and heads of a group."""
    state_BGRHP, document = carry
    x_BCGRH, dt_BCGR, b_BCGP, c_BCGP, documents_BC = inputs
    sums_BGRCC = segment_sums(jnp.moveaxis(dt_BCGR * decay, 1, -1))
    same_BCC = documents_BC[:, :, None] == documents_BC[:, None, :]
    first_BC = documents_BC == document[:, None]
    C = documents_BC.shape[1]
    visible = same_BCC & (jnp.arange(C)[:, None] >= jnp.arange(C))
    weights_BGRCC = jnp.where(visible[:, None, None], jnp.exp(sums_BGRCC), 0.0)
    scaled_BCGRH = dt_BCGR[..., None] * x_BCGRH
    # Letters of the einsums: T and S are tokens of the chunk, as query and as key.
    scores_BGTS = jnp.einsum("BTGP,BSGP->BGTS", c_BCGP, b_BCGP)
    y = jnp.einsum("BGTS,BGRTS,BSGRH->BTGRH", scores_BGTS, weights_BGRCC, scaled_BCGRH)
    total_BCGR = jnp.cumsum(dt_BCGR * decay, axis=1)
    reached_BCGR = jnp.where(first_BC[..., None, None], jnp.exp(total_BCGR), 0.0)
    y = y + reached_BCGR[..., None] * jnp.einsum("BTGP,BGRHP->BTGRH", c_BCGP, state_BGRHP)
    left_BGRC = weights_BGRCC[..., -1, :]
    written = jnp.einsum("BGRS,BSGRH,BSGP->BGRHP", left_BGRC, scaled_BCGRH, b_BCGP)
    state_BGRHP = reached_BCGR[:, -1, :, :, None, None] * state_BGRHP + written
    return (state_BGRHP, documents_BC[:, -1]), y


def segment_sums(a: Float[Array, "... C"]) -> Float[Array, "... C C"]:
    """Sum a over the tokens after s up to t, for every t >= s; what stands elsewhere means nothing but is finite.

    Sums of terms, never differences of running sums: those lose the small decays that follow large ones.

    Args:
        a: Log decay of each token; the length is at most `BLOCK` or a multiple of it.
    """
    C = a.shape[-1]
    if C <= BLOCK:
        after = jnp.arange(C)[:, None] > jnp.arange(C)
        return jnp.cumsum(jnp.where(after, a[..., :, None], 0.0), axis=-2)
    blocks = a.reshape(*a.shape[:-1], C // BLOCK, BLOCK)
    within = segment_sums(blocks)
    to_t = jnp.cumsum(blocks, axis=-1)
    from_here = jnp.flip(jnp.cumsum(jnp.flip(blocks, -1), axis=-1), -1)
    from_s = jnp.pad(from_here[..., 1:], [(0, 0)] * (blocks.ndim - 1) + [(0, 1)])
    # Row i of the rolled sums is the whole blocks after j and before i; what comes around to row 0 is never read.
    between = jnp.roll(segment_sums(to_t[..., -1]), 1, axis=-2)
    across = to_t[..., None, None] + between[..., :, None, :, None] + from_s[..., None, None, :, :]
    same = jnp.eye(C // BLOCK, dtype=bool)[:, None, :, None]
    return jnp.where(same, within[..., :, :, None, :], across).reshape(*a.shape, C)


def ssd_step(
    state: Float[Array, "B N H P"],
    x: Float[Array, "B N H"],
    dt: Float[Array, "B N"],
    decay: Float[Array, " N"],
    b: Float[Array, "B G P"],
    c: Float[Array, "B G P"],
    *,
    skip: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N H P"]]:
    """Read one more token; arguments as `ssd`'s, without a length.

    Returns:
        The output and the next state, both float32.
    """
    heads = x.shape[1] // b.shape[1]
    x, dt, state = (each.astype(jnp.float32) for each in (x, dt, state))
    b_BNP, c_BNP = (jnp.repeat(each.astype(jnp.float32), heads, axis=1) for each in (b, c))
    kept = jnp.exp(dt * decay.astype(jnp.float32))[..., None, None] * state
    state = kept + (dt[..., None] * x)[..., None] * b_BNP[:, :, None]
    y = jnp.einsum("BNHP,BNP->BNH", state, c_BNP)
    return y if skip is None else y + skip.astype(jnp.float32)[:, None] * x, state


def remaining(
    dt: Float[Array, "B T N"], decay: Float[Array, " N"], starts: Bool[Array, "B T"] | None = None
) -> Float[Array, "B T N"]:
    """Say which part of the state before the first token is left at each token: 0 from the first start on."""
    left = jnp.exp(jnp.cumsum(dt.astype(jnp.float32) * decay.astype(jnp.float32), axis=1))
    return left if starts is None else jnp.where(jnp.cumsum(starts, axis=1)[..., None] == 0, left, 0.0)


def read_state(
    c: Float[Array, "B T G P"], left: Float[Array, "B T N"], state: Float[Array, "B N H P"]
) -> Float[Array, "B T N H"]:
    """Give what a state before the first token adds to each output, from `remaining` of it."""
    B, N, H, P = state.shape
    G = c.shape[2]
    read = jnp.einsum("BTGP,BGRHP->BTGRH", c.astype(jnp.float32), state.reshape(B, G, N // G, H, P))
    return left[..., None] * read.reshape(B, -1, N, H)
