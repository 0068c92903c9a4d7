"""Which attention kernel each layer of a model takes, and why not a faster one, in words.

Entry point: `attention_report`.
"""

import collections
import math
from typing import Any

import jax.numpy as jnp

from dew.kernels.attention_choice import Accelerator, AttentionCall, accelerator, attention_choice
from dew.nn.attention import AttentionSpec


def attention_report(
    module: Any,
    *,
    mesh: Any = None,
    num_tokens: int | None = None,
    rows: int = 1,
    packed: bool = False,
    device: Accelerator | None = None,
) -> list[str]:
    """Say for each kind of attention layer which kernel runs its whole sequences.

    Args:
        module: A `CausalTransformer`.
        mesh: A concrete or planned mesh; its tensor axis splits the heads. None means one device.
        num_tokens: Length of the rows; None takes the model's longest context.
        rows: Rows of one device.
        packed: Whether rows hold several documents or padding.
        device: The device; None means the one that programs run on by default.

    Returns:
        A line per kind of layer.
    """
    num_tokens = module.max_length if num_tokens is None else num_tokens
    device = accelerator() if device is None else device
    tensor = 1 if mesh is None else mesh.shape.get("tensor", 1)
    mixers = [layer.mixer for layer in module.layers]
    kinds = collections.Counter(spec for spec in mixers if isinstance(spec, AttentionSpec))
    lines: dict[str, int] = {}
    for spec, count in kinds.items():
        shards = tensor if spec.num_heads % tensor == 0 else 1
        call = AttentionCall(
            rows=rows,
            num_queries=num_tokens,
            num_keys=num_tokens,
            num_heads=spec.num_heads // shards,
            num_kv_heads=math.ceil(spec.num_kv_heads / shards),
            head_dim=spec.head_dim,
            dtype=jnp.dtype(module.dtype).name,
            window=spec.window,
            chunk=getattr(spec, "chunk", None),
            segments=packed,
            softcap=spec.softcap is not None,
            sinks=bool(getattr(spec, "sinks", False)),
        )
        limits = "".join(
            f", {field} {getattr(call, field)}" for field in ("window", "chunk") if getattr(call, field) is not None
        )
        try:
            chosen = str(attention_choice(call, module.attention_impl, device))
        except ValueError as refusal:
            chosen = f"refused: {refusal}"
        text = f"of {call.num_queries} tokens{limits}{' in documents' if packed else ''}, {call.dtype}: {chosen}"
        lines[text] = lines.get(text, 0) + count
    return [f"attention of {count} layer{'s' if count > 1 else ''} {text}" for text, count in lines.items()]


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
