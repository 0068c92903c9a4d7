"""A decoder in NumPy and float64, one layer and one query at a time: what a spec means, without banks or caches."""

import math

import numpy as np

from dew.nn.gated_delta_net import GatedDeltaNetSpec
from dew.nn.latent_attention import LatentAttentionSpec
from dew.nn.mamba2 import Mamba2Spec
from tests.kernels import slow_delta_rule, slow_ssd

ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def norm(spec, weights, x, dims=1):
    axes = tuple(range(-dims, 0))
    if spec.kind == "layer":
        x = x - x.mean(axes, keepdims=True)
    x = x / np.sqrt((x * x).mean(axes, keepdims=True) + spec.eps)
    shape = x.shape[-dims:]
    x = x * (weights["scale"].reshape(shape) + spec.offset)
    return x + weights["bias"].reshape(shape) if spec.bias else x


def linear(weights, x, dims=1):
    y = np.tensordot(x, weights["kernel"], dims)
    return y + weights["bias"] if "bias" in weights else y


def rotate(spec, x, position):
    """Multiply pairs of dimensions by unit complex numbers; x is [heads, H]."""
    x, width = x.copy(), int(x.shape[-1] * spec.fraction)
    half = np.arange(width // 2)
    first, second = (2 * half, 2 * half + 1) if spec.interleaved else (half, half + width // 2)
    turned = (x[:, first] + 1j * x[:, second]) * np.exp(1j * position * spec.theta ** (-2 * half / width))
    x[:, first], x[:, second] = turned.real, turned.imag
    return x


def attention(spec, weights, x):
    query, key, value = (linear(weights[name], x) for name in ("q_proj", "k_proj", "v_proj"))
    if spec.qk_norm is not None:
        dims = 1 if spec.qk_norm_over == "head" else 2
        query, key = (
            norm(spec.qk_norm, weights["q_norm"], query, dims),
            norm(spec.qk_norm, weights["k_norm"], key, dims),
        )
    if spec.rotary is not None:
        query, key = (np.stack([rotate(spec.rotary, row, t) for t, row in enumerate(heads)]) for heads in (query, key))
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    mixed = np.zeros(query.shape)
    for t, head in np.ndindex(query.shape[:2]):
        first = 0 if spec.window is None else max(0, t - spec.window + 1)
        first = first if spec.chunk is None else max(first, t // spec.chunk * spec.chunk)
        own = head // (spec.num_heads // spec.num_kv_heads)
        logits = key[first : t + 1, own] @ query[t, head] * scale
        if spec.softcap is not None:
            logits = spec.softcap * np.tanh(logits / spec.softcap)
        nowhere = np.exp(weights["sinks"][head] - logits.max()) if spec.sinks else 0
        shares = np.exp(logits - logits.max())
        mixed[t, head] = shares / (shares.sum() + nowhere) @ value[first : t + 1, own]
    if spec.gate:
        mixed = mixed / (1 + np.exp(-linear(weights["gate_proj"], x)))
    return linear(weights["o_proj"], mixed, 2)


def latent_attention(spec, weights, x):
    def latent(name, rows):
        return norm(spec.norm, weights[f"{name}_a_norm"], rows)

    if spec.q_lora_rank is None:
        query = linear(weights["q_proj"], x)
    else:
        query = linear(weights["q_b_proj"], latent("q", linear(weights["q_a_proj"], x)))
    kept, fixed = linear(weights["kv_a_proj"], x), spec.qk_nope_head_dim
    narrow = latent("kv", kept[:, : spec.kv_lora_rank])
    key, value = linear(weights["k_b_proj"], narrow), linear(weights["v_b_proj"], narrow)
    mixed = np.zeros(value.shape)
    turned = [rotate(spec.rotary, row[None, spec.kv_lora_rank :], t)[0] for t, row in enumerate(kept)]
    for t, head in np.ndindex(query.shape[:2]):
        own = rotate(spec.rotary, query[t, head : head + 1, fixed:], t)[0]
        logits = np.array([key[s, head] @ query[t, head, :fixed] + turned[s] @ own for s in range(t + 1)])
        logits = logits / math.sqrt(spec.qk_nope_head_dim + spec.qk_rope_head_dim)
        shares = np.exp(logits - logits.max())
        mixed[t, head] = shares / shares.sum() @ value[: t + 1, head]
    return linear(weights["o_proj"], mixed, 2)


def convolved(spec, weights, x, name):
    """What a stream is after its convolution, for one row."""
    value, conv = linear(weights[f"{name}_proj"], x), weights[f"{name}_conv"]
    shape, taps = value.shape, conv["kernel"].reshape(-1, spec.conv_kernel)
    mixed = slow_ssd.convolution(value.reshape(1, len(x), -1), taps)[0].reshape(shape)
    return ACTIVATIONS[spec.activation](mixed + conv.get("bias", 0.0))[None]


def mamba(spec, weights, x):
    gate, raw = linear(weights["gate_proj"], x), linear(weights["dt_proj"], x)
    dt = np.clip(np.log1p(np.exp(raw + weights["dt_bias"])), *spec.step_limits)[None]
    decay = -np.exp(weights["A_log"])
    x, b, c = (convolved(spec, weights, x, name) for name in "xbc")
    y, _ = slow_ssd.recurrence(x, dt, decay, b, c, weights["D"])
    gated = y[0] * ACTIVATIONS["silu"](gate)
    groups = gated.reshape(len(gated), spec.norm_groups, -1)
    normal = groups / np.sqrt((groups * groups).mean(-1, keepdims=True) + spec.norm_eps)
    return linear(weights["out_proj"], normal.reshape(gated.shape) * weights["norm_scale"], 2)


def delta_net(spec, weights, x):
    gate = linear(weights["gate_proj"], x).reshape(len(x), spec.num_heads, spec.head_dim)
    beta = 1 / (1 + np.exp(-linear(weights["beta_proj"], x)))
    steps = np.log1p(np.exp(linear(weights["decay_proj"], x) + weights["dt_bias"]))
    log_decay, beta = (each.reshape(1, len(x), -1) for each in (-np.exp(weights["A_log"]) * steps, beta))
    q, k, v = (convolved(spec, weights, x, name) for name in "qkv")
    q, k = slow_delta_rule.unit(q) / np.sqrt(spec.key_dim), slow_delta_rule.unit(k)
    y, _ = slow_delta_rule.recurrence(v.reshape(1, *gate.shape), k, q, log_decay, beta)
    normal = y[0] / np.sqrt((y[0] * y[0]).mean(-1, keepdims=True) + spec.norm_eps) * weights["norm"]["scale"]
    return linear(weights["out_proj"], (normal * ACTIVATIONS["silu"](gate)).reshape(len(x), spec.num_keys, -1), 2)


def mlp(spec, weights, x):
    up, activation = linear(weights["up_proj"], x), ACTIVATIONS[spec.activation]
    hidden = activation(linear(weights["gate_proj"], x)) * up if spec.gated else activation(up)
    return linear(weights["down_proj"], hidden)


def layer(spec, weights, x):
    def normal(name, x):
        return norm(spec.norm, weights[name], x)

    def mix(x):
        if isinstance(spec.mixer, Mamba2Spec):
            return spec.residual_scale * mamba(spec.mixer, weights["mamba"], x)
        if isinstance(spec.mixer, GatedDeltaNetSpec):
            return spec.residual_scale * delta_net(spec.mixer, weights["linear_attn"], x)
        attend = latent_attention if isinstance(spec.mixer, LatentAttentionSpec) else attention
        return spec.residual_scale * attend(spec.mixer, weights["self_attn"], x)

    def think(x):
        return spec.residual_scale * mlp(spec.mlp, weights["mlp"], x)

    assert spec.residual_scale == 1 or spec.placement == "pre"
    match spec.placement:
        case "pre":
            x = x + mix(normal("input_layernorm", x))
            return x if spec.mlp is None else x + think(normal("post_attention_layernorm", x))
        case "post":
            x = x + normal("post_attention_layernorm", mix(x))
            return x + normal("post_feedforward_layernorm", think(x))
        case "both":
            x = x + normal("post_attention_layernorm", mix(normal("input_layernorm", x)))
            return x + normal("post_feedforward_layernorm", think(normal("pre_feedforward_layernorm", x)))
        case "parallel":
            return x + mix(normal("input_layernorm", x)) + think(normal("post_attention_layernorm", x))
        case "parallel_one_norm":
            return x + mix(normal("input_layernorm", x)) + think(normal("input_layernorm", x))


def logits(module, params, tokens):
    """Logits [B, T, V] of a `CausalTransformer` from its per-layer parameters."""
    table = params["embed_tokens"]["embedding"]
    x = table[tokens] * module.embedding.scale
    if module.embedding.positions is not None:
        x = x + params["embed_positions"]["embedding"][: tokens.shape[1]]
    rows = []
    for row in x:
        for index, spec in enumerate(module.layers):
            row = layer(spec, params[f"layers_{index}"], row)
        rows.append(norm(module.norm, params["norm"], row))
    head = table if module.tie_embeddings else params["lm_head"]["embedding"]
    scores = np.stack(rows) @ head.T * module.head.scale
    cap = module.head.softcap
    return scores if cap is None else cap * np.tanh(scores / cap)
