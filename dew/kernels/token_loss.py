"""Cross entropy over a large vocabulary, one chunk of tokens at a time.

Entry points: `token_cross_entropy`, which differentiates, and the two passes under it. Where a gradient is asked
for, each chunk's logits are computed once and turned into both gradients at once: three matrix products in
all, and never more than one chunk's logits.
"""

import functools

import jax
import jax.numpy as jnp

from dew.arrays import Array, Float, Int

CHUNK_BYTES = 2**27
"""Float32 logits of a chunk take at most this much."""


def token_cross_entropy(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "T"],
    weights: Float[Array, "T"],
    *,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum the weighted cross entropies of tokens, in nats.

    Differentiable with respect to `hidden` and `head`; `weights` are constants.

    Args:
        hidden: Hidden states that predict the targets.
        head: Vocabulary matrix; its products run in the dtype of `hidden` and accumulate in float32.
        targets: The tokens to predict.
        weights: Weight of each token; 0 leaves it out.
        softcap: Bound c of the logits, c * tanh(logit / c); None leaves them.
        scale: Factor on the logits, before the bound.

    Returns:
        The weighted sum of the cross entropies, and the weighted count of tokens that no other token outscores.
    """
    return _token_cross_entropy(hidden, head, targets, weights, softcap, scale)


def token_loss(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "T"],
    weights: Float[Array, "T"],
    *,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Compute `token_cross_entropy` without its gradients: one matrix product."""
    head = head.astype(hidden.dtype)

    def step(sums, chunk):
        loss, correct, _ = _chunk(chunk, head, softcap, scale)
        return (sums[0] + loss, sums[1] + correct), None

    zero = jnp.zeros((), jnp.float32)
    sums, _ = jax.lax.scan(step, (zero, zero), _chunks(hidden, targets, weights, head.shape[0]))
    return sums


def token_loss_and_gradients(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "T"],
    weights: Float[Array, "T"],
    *,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, "T D"], Float[Array, "V D"]]:
    """Compute `token_cross_entropy` and the gradients of its first output.

    Returns:
        Sum, correct count, gradient by `hidden` in its dtype, gradient by `head` in float32.
    """
    num_tokens, narrow = hidden.shape[0], head.astype(hidden.dtype)

    def step(sums, chunk):
        loss, correct, logit_gradient = _chunk(chunk, narrow, softcap, scale)
        logit_gradient = logit_gradient.astype(hidden.dtype)
        hidden_gradient = logit_gradient @ narrow
        head_gradient = jnp.einsum("TV,TD->VD", logit_gradient, chunk[0], preferred_element_type=jnp.float32)
        return (sums[0] + loss, sums[1] + correct, sums[2] + head_gradient), hidden_gradient

    zero = jnp.zeros((), jnp.float32)
    chunks = _chunks(hidden, targets, weights, head.shape[0])
    start = (zero, zero, jnp.zeros(head.shape, jnp.float32))
    (loss, correct, head_gradient), hidden_gradient = jax.lax.scan(step, start, chunks)
    return loss, correct, hidden_gradient.reshape(-1, hidden.shape[1])[:num_tokens], head_gradient


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _token_cross_entropy(hidden, head, targets, weights, softcap, scale):
    return token_loss(hidden, head, targets, weights, softcap=softcap, scale=scale)


def _forward(hidden, head, targets, weights, softcap, scale):
    loss, correct, hidden_gradient, head_gradient = token_loss_and_gradients(
        hidden, head, targets, weights, softcap=softcap, scale=scale
    )
    return (loss, correct), (hidden_gradient, head_gradient.astype(head.dtype))


def _backward(softcap, scale, gradients, cotangents):
    hidden_gradient, head_gradient = (gradient * cotangents[0].astype(gradient.dtype) for gradient in gradients)
    return hidden_gradient, head_gradient, None, None


_token_cross_entropy.defvjp(_forward, _backward)


def _chunks(hidden: Array, targets: Array, weights: Array, vocab_size: int) -> tuple[Array, Array, Array]:
    """Cut the tokens into equal chunks, the last filled up with tokens of weight 0."""
    num_tokens = hidden.shape[0]
    num_chunks = max(1, -(-num_tokens * vocab_size * 4 // CHUNK_BYTES))
    size = -(-num_tokens // num_chunks)

    def cut(x: Array) -> Array:
        padded = jnp.pad(x, [(0, num_chunks * size - num_tokens)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(num_chunks, size, *x.shape[1:])

    return cut(hidden), cut(targets), cut(weights.astype(jnp.float32))


def _chunk(
    chunk: tuple[Array, Array, Array], head: Array, softcap: float | None, scale: float
) -> tuple[Array, Array, Array]:
    """Score a chunk (hidden, targets, weights): its loss, its correct count, the loss's gradient by hidden @ head.T."""
    hidden, targets, weights = chunk
    logits = jnp.einsum("TD,VD->TV", hidden, head, preferred_element_type=jnp.float32)
    if scale != 1.0:
        logits *= scale
    slope: Array | float = scale
    if softcap is not None:
        bounded = jnp.tanh(logits / softcap)
        logits, slope = softcap * bounded, scale * (1.0 - bounded * bounded)
    highest = jnp.max(logits, axis=-1, keepdims=True)
    log_total = highest + jnp.log(jnp.sum(jnp.exp(logits - highest), axis=-1, keepdims=True))
    is_target = jnp.arange(head.shape[0], dtype=targets.dtype)[None, :] == targets[:, None]
    target_logits = jnp.take_along_axis(logits, targets[:, None], axis=-1)
    losses = (log_total - target_logits)[:, 0]
    correct = (target_logits >= highest)[:, 0]
    # A second exponential is cheaper than keeping and dividing the first: 8 % of the whole loss on CPU.
    gradient = (jnp.exp(logits - log_total) - is_target) * weights[:, None] * slope
    # A weight of 0 leaves a token out even where its loss is not finite.
    scored = weights != 0
    loss = jnp.sum(jnp.where(scored, losses * weights, 0.0))
    return loss, jnp.sum(jnp.where(scored, correct * weights, 0.0)), gradient
