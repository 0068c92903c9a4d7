"""The gated delta rule on one device, in chunks.

Entry points: `delta_rule` for whole sequences, `delta_rule_step` for one token, `unit` for keys and queries; gates as
in https://arxiv.org/abs/2412.06464, chunks as in https://arxiv.org/abs/2406.06484, section 3: a chunk's writes solve
a triangular system. In float32; the gradient keeps the states between chunks and nothing of a chunk.
"""

import functools

import jax
import jax.numpy as jnp

from dew.arrays import Array, Bool, Float
from dew.kernels.ssd import chunk_length, computed_again, in_chunks, segment_sums

CHUNK = 64
"""Tokens of a chunk: triangular systems grow with its square, chunks that wait for each other with their number."""
UNIT_EPS = 1e-6
"""Added to the squared length of a key or query."""

# The system's solution multiplies its rounding, so what it is made of is not rounded to narrower numbers anywhere.
_exact = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def unit(x: Float[Array, "... P"]) -> Float[Array, "... P"]:
    """Divide by the length, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + UNIT_EPS)


def delta_rule(
    v: Float[Array, "B T N H"],
    k: Float[Array, "B T G P"],
    q: Float[Array, "B T G P"],
    log_decay: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    *,
    starts: Bool[Array, "B T"] | None = None,
    initial_state: Float[Array, "B N H P"] | None = None,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N H P"]]:
    """Decay the state, correct what it holds for the token's key towards the token's value, and read it.

    state = exp(log_decay_t) state_(t-1), state_t = state + beta_t (v_t - state k_t) k_t^T, y_t = state_t q_t. Head n
    has the key and the query n // (N // G). Forward, backward and what is computed again cost
    2 (8 C G P + 5.5 C N H + 11 N H P) operations a token, the system solved three times for C N H each.

    Args:
        v: Values of the tokens.
        k: Their keys, of length 1 or less.
        q: Their queries.
        log_decay: Log of what is left of the state, 0 or less; a token with 0 here and in `beta` leaves it as it is.
        beta: Part of the correction that is made, from 0 to 1.
        starts: Tokens that forget everything before them; None means none does.
        initial_state: The state before the first token; None means zero.
        chunk: Tokens that are computed at once.

    Returns:
        The outputs and the state after the last token, both float32.
    """
    B, T, N, H = v.shape
    G, P = k.shape[2:]
    assert N % G == 0, f"{N} heads cannot share {G} keys evenly"
    chunk = chunk_length(T, chunk)
    v, k, q, log_decay, beta = (each.astype(jnp.float32) for each in (v, k, q, log_decay, beta))
    documents = jnp.zeros((B, T), jnp.int32) if starts is None else jnp.cumsum(starts, axis=1, dtype=jnp.int32)
    gates = (each.reshape(B, T, G, N // G) for each in (log_decay, beta))
    tokens = (v.reshape(B, T, G, N // G, H), k, q, *gates)
    state = jnp.zeros((B, N, H, P), jnp.float32) if initial_state is None else initial_state.astype(jnp.float32)
    (state, _), y = jax.lax.scan(
        computed_again(_chunk),
        (state.reshape(B, G, N // G, H, P), jnp.zeros(B, jnp.int32)),
        (*(in_chunks(each, chunk) for each in tokens), in_chunks(documents, chunk, "edge")),
    )
    return y.swapaxes(0, 1).reshape(B, -1, N, H)[:, :T], state.reshape(B, N, H, P)


def _chunk(carry, inputs):
    """Compute one chunk from the state before it; heads are [G, R], keys and the heads that share one."""
    state_BGRHP, document = carry
    v_BCGRH, k_BCGP, q_BCGP, log_decay_BCGR, beta_BCGR, documents_BC = inputs
    C = documents_BC.shape[1]
    later = jnp.arange(C)[:, None] - jnp.arange(C)
    same_BCC = documents_BC[:, :, None] == documents_BC[:, None, :]
    first_BC = documents_BC == document[:, None]
    # Letters of the einsums: T and S are tokens of the chunk, as the one that reads and the one that wrote.
    sums_BGRTS = segment_sums(jnp.moveaxis(log_decay_BCGR, 1, -1))
    left_BGRTS = jnp.where((same_BCC & (later >= 0))[:, None, None], jnp.exp(sums_BGRTS), 0.0)
    reached_BCGR = jnp.where(first_BC[..., None, None], jnp.exp(jnp.cumsum(log_decay_BCGR, axis=1)), 0.0)
    beta_BGRC, reached_BGRC = (jnp.moveaxis(each, 1, -1) for each in (beta_BCGR, reached_BCGR))
    # What token t writes is beta_t (v_t - what all before it hold for its key), tokens of the chunk among them.
    overlaps_BGTS = _exact("BTGP,BSGP->BGTS", k_BCGP, k_BCGP)
    system_BGRTS = jnp.where(later > 0, beta_BGRC[..., None] * left_BGRTS * overlaps_BGTS[:, :, None], 0.0)
    held_BGRCH = reached_BGRC[..., None] * _exact("BTGP,BGRHP->BGRTH", k_BCGP, state_BGRHP)
    wanted_BGRCH = beta_BGRC[..., None] * (jnp.moveaxis(v_BCGRH, 1, 3) - held_BGRCH)
    written_BGRCH = jax.lax.linalg.triangular_solve(
        system_BGRTS, wanted_BGRCH, left_side=True, lower=True, unit_diagonal=True
    )
    scores_BGTS = jnp.einsum("BTGP,BSGP->BGTS", q_BCGP, k_BCGP)
    y = jnp.einsum("BGTS,BGRTS,BGRSH->BTGRH", scores_BGTS, left_BGRTS, written_BGRCH)
    y = y + reached_BCGR[..., None] * jnp.einsum("BTGP,BGRHP->BTGRH", q_BCGP, state_BGRHP)
    added = jnp.einsum("BGRS,BGRSH,BSGP->BGRHP", left_BGRTS[..., -1, :], written_BGRCH, k_BCGP)
    state_BGRHP = reached_BCGR[:, -1, :, :, None, None] * state_BGRHP + added
    return (state_BGRHP, documents_BC[:, -1]), y


def delta_rule_step(
    state: Float[Array, "B N H P"],
    v: Float[Array, "B N H"],
    k: Float[Array, "B G P"],
    q: Float[Array, "B G P"],
    log_decay: Float[Array, "B N"],
    beta: Float[Array, "B N"],
) -> tuple[Float[Array, "B N H"], Float[Array, "B N H P"]]:
    """Read one more token; arguments as `delta_rule`'s, without a length.

    Returns:
        The output and the next state, both float32.
    """
    heads = v.shape[1] // k.shape[1]
    state, v, log_decay, beta = (each.astype(jnp.float32) for each in (state, v, log_decay, beta))
    k_BNP, q_BNP = (jnp.repeat(each.astype(jnp.float32), heads, axis=1) for each in (k, q))
    state = jnp.exp(log_decay)[..., None, None] * state
    written = beta[..., None] * (v - jnp.einsum("BNHP,BNP->BNH", state, k_BNP))
    state = state + written[..., None] * k_BNP[:, :, None]
    return jnp.einsum("BNHP,BNP->BNH", state, q_BNP), state
