"""A Llama written by hand in plain JAX for one device: the floor that the benchmarks compare with.

No modules, no meshes, no options. Layers are stacked and scanned, or a list and unrolled; the
faster of the two counts. Entry points: `train_step`, `generate_function`, `weights_from`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Weights = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and constants of a Llama; the defaults are those of SmolLM2-135M."""

    vocab: int = 49152
    width: int = 576
    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    mlp: int = 1536
    theta: float = 100_000.0
    eps: float = 1e-5


def weights_from(params: Any, shape: Shape, *, stacked: bool) -> Weights:
    """Rewrite the parameters of a scanned `CausalTransformer` with tied embeddings.

    Args:
        params: Its "params" collection, one bank of all layers.
        shape: Sizes.
        stacked: Whether layers stay stacked or become a list.

    Returns:
        Matrices [in, out], copied.
    """
    bank = params[f"layers_0_{shape.layers - 1}"]
    attention, mlp, count = bank["self_attn"], bank["mlp"], shape.layers
    layers = {
        "first_norm": bank["input_layernorm"]["scale"],
        "q": attention["q_proj"]["kernel"].reshape(count, shape.width, -1),
        "k": attention["k_proj"]["kernel"].reshape(count, shape.width, -1),
        "v": attention["v_proj"]["kernel"].reshape(count, shape.width, -1),
        "o": attention["o_proj"]["kernel"].reshape(count, -1, shape.width),
        "second_norm": bank["post_attention_layernorm"]["scale"],
        "gate": mlp["gate_proj"]["kernel"],
        "up": mlp["up_proj"]["kernel"],
        "down": mlp["down_proj"]["kernel"],
    }
    if not stacked:
        layers = [{name: value[index] for name, value in layers.items()} for index in range(count)]
    weights = {"table": params["embed_tokens"]["embedding"], "norm": params["norm"]["scale"], "layers": layers}
    return jax.tree.map(jnp.copy, weights)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Divide by the root mean square and scale."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * scale


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Turn the two halves of each head of [B, T, N, H] by an angle per position."""
    half = x.shape[-1] // 2
    angles = positions[:, None].astype(jnp.float32) * theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def block(shape: Shape, x: jax.Array, w: Weights, positions: Any, visible: Any, window: Any = None, at: Any = 0):
    """Apply one layer to [B, T, D]; `window` is its (keys, values) cache, written from slot `at`."""
    rows, length, _ = x.shape
    h = rms_norm(x, w["first_norm"], shape.eps)
    q = rotate((h @ w["q"]).reshape(rows, length, shape.heads, shape.head_dim), positions, shape.theta)
    k = rotate((h @ w["k"]).reshape(rows, length, shape.kv_heads, shape.head_dim), positions, shape.theta)
    v = (h @ w["v"]).reshape(rows, length, shape.kv_heads, shape.head_dim)
    if window is not None:
        k = jax.lax.dynamic_update_slice(window[0], k, (0, at, 0, 0))
        v = jax.lax.dynamic_update_slice(window[1], v, (0, at, 0, 0))
        window = (k, v)
    q = q.reshape(rows, length, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * shape.head_dim**-0.5
    mixing = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    x = x + jnp.einsum("bkgts,bskh->btkgh", mixing, v).reshape(rows, length, -1) @ w["o"]
    h = rms_norm(x, w["second_norm"], shape.eps)
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], window


def hidden_states(shape: Shape, weights: Weights, tokens: jax.Array) -> jax.Array:
    """Run all layers and the last norm on whole rows [B, T]."""
    length = tokens.shape[1]
    positions, visible = jnp.arange(length), jnp.tril(jnp.ones((length, length), bool))
    x = weights["table"][tokens]
    if isinstance(weights["layers"], dict):
        x, _ = jax.lax.scan(lambda x, w: (block(shape, x, w, positions, visible)[0], None), x, weights["layers"])
    else:
        for w in weights["layers"]:
            x, _ = block(shape, x, w, positions, visible)
    return rms_norm(x, weights["norm"], shape.eps)


def mean_loss(shape: Shape, weights: Weights, tokens: jax.Array) -> jax.Array:
    """Average the cross entropy of every next token of [B, T + 1]."""
    hidden, targets = hidden_states(shape, weights, tokens[:, :-1]), tokens[:, 1:]
    logits = jnp.einsum("btd,vd->btv", hidden, weights["table"])
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def train_step(
    shape: Shape, *, rate: float = 1e-4, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, decay: float = 0.01
) -> tuple[Callable[[Weights], Any], Callable[[Any, jax.Array], Any]]:
    """Build AdamW training with the state donated from step to step.

    Returns:
        A function that makes the state (weights, first moments, second moments, count) and the
        compiled step (state, tokens) -> (state, loss).
    """

    def start(weights: Weights) -> Any:
        return (
            weights,
            jax.tree.map(jnp.zeros_like, weights),
            jax.tree.map(jnp.zeros_like, weights),
            jnp.zeros((), jnp.int32),
        )

    def step(state: Any, tokens: jax.Array) -> Any:
        weights, first, second, count = state
        loss, gradients = jax.value_and_grad(lambda w: mean_loss(shape, w, tokens))(weights)
        count = count + 1
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, first, gradients)
        second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, second, gradients)
        first_scale, second_scale = 1 / (1 - b1**count), 1 / (1 - b2**count)

        def moved(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return w - rate * (m * first_scale / (jnp.sqrt(v * second_scale) + eps) + decay * w)

        return (jax.tree.map(moved, weights, first, second), first, second, count), loss

    return start, jax.jit(step, donate_argnums=0)


def generate_function(shape: Shape, new_tokens: int) -> Callable[[Weights, jax.Array], jax.Array]:
    """Build greedy generation of `new_tokens` tokens for prompts [B, T], compiled.

    Returns:
        A function of (weights, prompts) giving the new tokens [B, new_tokens].
    """

    def advance(weights: Weights, tokens: jax.Array, cache: Any, at: Any) -> tuple[jax.Array, Any]:
        stacked = isinstance(weights["layers"], dict)
        slots = (cache[0] if stacked else cache[0][0]).shape[-3]
        positions = at + jnp.arange(tokens.shape[1])
        visible = jnp.arange(slots)[None] <= positions[:, None]
        x = weights["table"][tokens]
        if stacked:
            x, cache = jax.lax.scan(
                lambda x, layer: block(shape, x, layer[0], positions, visible, layer[1], at),
                x,
                (weights["layers"], cache),
            )
        else:
            windows = []
            for w, window in zip(weights["layers"], cache, strict=True):
                x, window = block(shape, x, w, positions, visible, window, at)
                windows.append(window)
            cache = windows
        last = rms_norm(x[:, -1], weights["norm"], shape.eps)
        return jnp.argmax(last @ weights["table"].T, axis=-1).astype(jnp.int32), cache

    @jax.jit
    def generate(weights: Weights, prompts: jax.Array) -> jax.Array:
        rows, length = prompts.shape
        window = (rows, length + new_tokens, shape.kv_heads, shape.head_dim)
        if isinstance(weights["layers"], dict):
            cache: Any = (jnp.zeros((shape.layers, *window)), jnp.zeros((shape.layers, *window)))
        else:
            cache = [(jnp.zeros(window), jnp.zeros(window)) for _ in range(shape.layers)]
        token, cache = advance(weights, prompts, cache, 0)

        def one(carry: Any, _: None) -> tuple[Any, jax.Array]:
            token, cache, at = carry
            following, cache = advance(weights, token[:, None], cache, at)
            return (following, cache, at + 1), following

        _, rest = jax.lax.scan(one, (token, cache, jnp.asarray(length, jnp.int32)), None, length=new_tokens - 1)
        return jnp.concatenate([token[:, None], rest.T], axis=1)

    return generate
