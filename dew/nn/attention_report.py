"""Which attention kernel each layer of a model takes, and why not a faster one, in words.

Entry points: `attention_report`; `cache_report`, what decoding keeps of the layers' keys and values on a mesh.
"""

import collections
import math
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from dew.kernels.attention_choice import Accelerator, AttentionCall, accelerator, attention_choice
from dew.nn.attention import AttentionSpec
from dew.nn.cache import KEY_VALUE_NAMES
from dew.nn.exchange_report import exchange_report, layer_lines
from dew.nn.latent_attention import LatentAttentionSpec, attention_form
from dew.nn.masks import layer_limits
from dew.parallel.exchange import QUERY_NAMES
from dew.placement.rules import DEFAULT_RULES, resolve, spec_axes


def attention_report(
    module: Any,
    *,
    mesh: Any = None,
    num_tokens: int | None = None,
    rows: int = 1,
    packed: bool | None = None,
    device: Accelerator | None = None,
) -> list[str]:
    """Say for each kind of attention layer which kernel runs its whole sequences.

    Where the mesh splits positions that is the kernel inside an exchange, and the lines are those of
    `dew.nn.exchange_report.exchange_report`, which say both.

    Args:
        module: A `CausalTransformer`.
        mesh: A concrete or planned mesh, whose axes split rows and heads. None means one device.
        num_tokens: Length of the rows; None takes the model's longest context.
        rows: Rows of the global batch.
        packed: As `dew.nn.exchange_report.layer_lines`'.
        device: The device; None takes the mesh's, or the default.

    Returns:
        Its lines.
    """
    num_tokens = module.max_length if num_tokens is None else num_tokens
    device = accelerator(mesh) if device is None else device
    if mesh is not None and mesh.shape.get("sequence", 1) > 1:
        return exchange_report(module, mesh=mesh, num_tokens=num_tokens, rows=rows, packed=packed, device=device)
    dtype = jnp.dtype(module.dtype).name

    def describe(spec: AttentionSpec, in_documents: bool) -> str:
        row_shards, shards = _shards(mesh, QUERY_NAMES, (rows, num_tokens, spec.num_heads, spec.head_dim))[::2]
        window, chunk = layer_limits(spec.window, spec.chunk, in_documents=in_documents)
        call = AttentionCall(
            rows=rows // row_shards,
            num_queries=num_tokens,
            num_keys=num_tokens,
            num_heads=spec.num_heads // shards,
            num_kv_heads=math.ceil(spec.num_kv_heads / shards),
            head_dim=spec.head_dim,
            dtype=dtype,
            window=window,
            chunk=chunk,
            segments=in_documents,
            softcap=spec.softcap is not None,
            sinks=spec.sinks,
            dropout=module.attention_dropout_rate > 0,
        )
        try:
            return str(attention_choice(call, module.attention_impl, device))
        except ValueError as refusal:
            return f"refused: {refusal}"

    kinds = _attention_kinds(module)
    return layer_lines(f"of {num_tokens} tokens", "attention", kinds, describe, packed=packed, dtype=f", {dtype}")


def cache_report(module: Any, *, mesh: Any) -> list[str]:
    """Say what decoding keeps more than once: latents, and keys and values of heads that do not divide the tensor axis.

    Args:
        module: A `CausalTransformer`.
        mesh: The concrete or planned mesh it decodes on.

    Returns:
        A line per number of key/value heads that stay whole, and one for latents; none where every device keeps its
        own heads.
    """
    tensor = mesh.shape.get("tensor", 1)
    kept: collections.Counter[tuple[str, str]] = collections.Counter()
    for spec in (layer.mixer for layer in module.layers) if tensor > 1 else ():
        if isinstance(spec, LatentAttentionSpec):
            kept["latents without heads", "latents"] += 1
        elif isinstance(spec, AttentionSpec):
            heads = spec.num_kv_heads
            if _shards(mesh, KEY_VALUE_NAMES, (1, 1, heads, 1, spec.head_dim))[2] == 1:
                kept[f"{heads} key/value head{'s' if heads > 1 else ''}", "keys and values"] += 1
    return [
        f"cache of {count} layer{'s' if count > 1 else ''}: {what} over tensor={tensor}: each of the {tensor} devices "
        f"of a group keeps all {kind} of its rows, once"
        for (what, kind), count in kept.items()
    ]


def _attention_kinds(module: Any) -> list[tuple[AttentionSpec, int]]:
    forms = [attention_form(layer.mixer) for layer in module.training_layers]
    return list(collections.Counter(spec for spec in forms if spec is not None).items())


def _shards(mesh: Any, names: tuple[str | None, ...], shape: tuple[int, ...]) -> list[int]:
    """Count the parts of each dimension under the active rules."""
    if mesh is None:
        return [1] * len(shape)
    spec = resolve(names, shape, mesh, nn.get_logical_axis_rules() or DEFAULT_RULES).spec
    counts = [math.prod(mesh.shape[axis] for axis in spec_axes(PartitionSpec(entry))) for entry in spec]
    return counts + [1] * (len(shape) - len(counts))


def accelerator_named(name: str) -> Accelerator:
    """Read a device's description, as in cpu, tpu, rocm, cuda:9.0.

    Args:
        name: Platform, and for CUDA the compute capability; cuDNN is taken to be there.

    Raises:
        ValueError: If it is none of these.
    """
    platform, _, capability = name.partition(":")
    numbers = capability.split(".")
    if platform in ("cpu", "tpu", "rocm") and not capability:
        return Accelerator(platform=platform)
    if platform == "cuda" and len(numbers) == 2 and all(number.isdecimal() for number in numbers):
        return Accelerator(platform="cuda", capability=(int(numbers[0]), int(numbers[1])), cudnn=0)
    raise ValueError(
        f"an accelerator is cpu, tpu, rocm, or cuda: with its compute capability, cuda:9.0. Received: {name!r}"
    )
