"""Which attention kernel runs a call: one table of what each kernel needs, read by the dispatch and by explanations.

Entry points: `KERNELS`, the table; `AttentionCall`, all that a choice depends on; `attention_choice`,
`kernel_refusals`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dew.arrays import Array
from dew.kernels.visibility import Visibility

Implementation = Literal["auto", "xla", "cudnn", "tpu"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("auto", "xla", "cudnn", "tpu")
MASK_BYTES = 2**30
"""An explicit mask of cuDNN may take this much, and its unused gradient as much again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """What a kernel may need to know of a device.

    Attributes:
        platform: "cpu", "tpu", "cuda" or "rocm".
        capability: Compute capability of a CUDA GPU, (9, 0) for Hopper.
        cudnn: Version number of the installed cuDNN; None where there is none.
    """

    platform: str
    capability: tuple[int, int] = (0, 0)
    cudnn: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """All that the choice of a kernel depends on; it is known when the call is traced.

    Attributes:
        rows: Rows B.
        num_queries: Queries T of a row.
        num_keys: Keys S of a row.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Width of a head; where values have another than keys, the larger, to which compiled kernels get both.
        dtype: Dtype of queries, keys and values.
        window: Slots a query reads; None means all before it.
        chunk: Length of the blocks a query reads its own of; None means all.
        offset: Slots from the first key to the first query; None where only the running program knows, or where slots
            are not consecutive.
        key_start: Slot of the first key, likewise.
        segments: Whether documents hide each other, or padding is hidden.
        softcap: Whether the logits are bounded.
        sinks: Whether heads have sinks.
        dropout: Whether probabilities are dropped, which training alone does.
    """

    rows: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None
    chunk: int | None = None
    offset: int | None = 0
    key_start: int | None = 0
    segments: bool = False
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False

    @classmethod
    def of(
        cls,
        query: Array,
        key: Array,
        visibility: Visibility,
        softcap: float | None = None,
        sinks: Any = None,
        value_dim: int = 0,
        dropout: Any = None,
    ) -> AttentionCall:
        """Describe the operands of `dew.kernels.attention.attention`; `value_dim` where values are not as keys."""
        rows, num_queries, num_heads, head_dim = query.shape
        return cls(
            rows=rows,
            num_queries=num_queries,
            num_keys=key.shape[2],
            num_heads=num_heads,
            num_kv_heads=key.shape[1],
            head_dim=max(head_dim, value_dim),
            dtype=jnp.dtype(query.dtype).name if query.dtype == key.dtype else "mixed",
            window=visibility.window,
            chunk=visibility.chunk,
            offset=visibility.offset,
            key_start=visibility.key_start,
            segments=visibility.query_segments is not None,
            softcap=softcap is not None,
            sinks=sinks is not None,
            dropout=dropout is not None,
        )

    def part(self, row_shards: int, head_shards: int) -> AttentionCall:
        """Describe the part of the call that one device gets where rows and heads are split evenly."""
        return dataclasses.replace(
            self,
            rows=self.rows // row_shards,
            num_heads=self.num_heads // head_shards,
            num_kv_heads=-(-self.num_kv_heads // head_shards),
        )


@dataclasses.dataclass(frozen=True)
class Requirement:
    """One thing that a kernel needs.

    Attributes:
        needs: It in words, for the table.
        refusal: Function of (call, accelerator): why it is not met, or None where it is.
    """

    needs: str
    refusal: Callable[[AttentionCall, Accelerator], str | None]


def _unless(holds: Callable[[AttentionCall, Accelerator], bool], reason: Callable[[AttentionCall, Accelerator], str]):
    return lambda call, device: None if holds(call, device) else reason(call, device)


def _mask_bytes(call: AttentionCall) -> int:
    return call.rows * call.num_queries * call.num_keys * 2


_NO_DROPOUT = Requirement(
    "no dropout of probabilities, which training alone has",
    _unless(lambda call, device: not call.dropout, lambda call, device: "it has no dropout of probabilities"),
)

_CUDNN = (
    Requirement(
        "a CUDA GPU of compute capability 8.0 (Ampere) or newer, and cuDNN",
        _unless(
            lambda call, device: device.platform == "cuda" and device.capability >= (8, 0) and device.cudnn is not None,
            lambda call, device: (
                f"the device is a {device.platform}"
                if device.platform != "cuda"
                else f"the GPU's compute capability is {'.'.join(map(str, device.capability))}"
                if device.capability < (8, 0)
                else "cuDNN is not installed"
            ),
        ),
    ),
    Requirement(
        "bfloat16 or float16",
        _unless(lambda call, device: call.dtype in ("bfloat16", "float16"), lambda call, device: f"dtype {call.dtype}"),
    ),
    Requirement(
        "heads of a multiple of 8, up to 128 wide (up to 256 from compute capability 9.0, Hopper, on)",
        _unless(
            lambda call, device: (
                call.head_dim % 8 == 0 and call.head_dim <= (256 if device.capability >= (9, 0) else 128)
            ),
            lambda call, device: f"heads are {call.head_dim} wide",
        ),
    ),
    Requirement(
        "queries and keys from the same slot on, known when the program is traced: no cache, no other device's keys",
        _unless(
            lambda call, device: call.offset == 0,
            lambda call, device: (
                "where the queries lie among the keys is known only when the program runs, or they are not consecutive"
                if call.offset is None
                else f"queries begin {call.offset} slots after the keys"
            ),
        ),
    ),
    Requirement(
        "with documents or chunks, which become an explicit mask: as many queries as keys, an even number, and a mask "
        "[rows, T, S] of 1 GiB at most",
        _unless(
            lambda call, device: (
                not (call.segments or call.chunk)
                or (call.num_queries == call.num_keys and call.num_keys % 2 == 0 and _mask_bytes(call) <= MASK_BYTES)
            ),
            lambda call, device: (
                f"documents or chunks of {call.rows} rows need a mask of {_mask_bytes(call) / 2**20:.4g} MiB for "
                f"{call.num_queries} queries and {call.num_keys} keys"
            ),
        ),
    ),
    Requirement("no softcap", _unless(lambda call, device: not call.softcap, lambda call, device: "it has no softcap")),
    Requirement(
        "no sinks",
        _unless(
            lambda call, device: not call.sinks,
            lambda call, device: "it has no sinks, and its log-sum-exp, which would do, no gradient",
        ),
    ),
    _NO_DROPOUT,
)

_TPU = (
    Requirement(
        "a TPU",
        _unless(
            lambda call, device: device.platform == "tpu", lambda call, device: f"the device is a {device.platform}"
        ),
    ),
    Requirement(
        "bfloat16 or float32",
        _unless(lambda call, device: call.dtype in ("bfloat16", "float32"), lambda call, device: f"dtype {call.dtype}"),
    ),
    Requirement(
        "heads of a multiple of 64 wide",
        _unless(lambda call, device: call.head_dim % 64 == 0, lambda call, device: f"heads are {call.head_dim} wide"),
    ),
    Requirement(
        "lengths of a multiple of 128",
        _unless(
            lambda call, device: call.num_queries % 128 == 0 and call.num_keys % 128 == 0,
            lambda call, device: f"{call.num_queries} queries and {call.num_keys} keys",
        ),
    ),
    Requirement(
        "queries at a distance from the keys that is known when the program is traced, each query's own slot a key",
        _unless(
            lambda call, device: call.offset is not None and 0 <= call.offset <= call.num_keys - call.num_queries,
            lambda call, device: (
                "where the queries lie among the keys is known only when the program runs, or they are not consecutive"
                if call.offset is None
                else f"{call.num_queries} queries begin {call.offset} slots after {call.num_keys} keys"
            ),
        ),
    ),
    Requirement(
        "with documents: queries and keys of the same slots",
        _unless(
            lambda call, device: not call.segments or (call.num_queries == call.num_keys),
            lambda call, device: f"documents of {call.num_queries} queries and {call.num_keys} keys",
        ),
    ),
    Requirement(
        "with chunks: queries and keys of the same slots, from a whole chunk on; no window beside them",
        _unless(
            lambda call, device: (
                call.chunk is None
                or (
                    call.window is None
                    and call.offset == 0
                    and call.key_start is not None
                    and call.key_start % call.chunk == 0
                )
            ),
            lambda call, device: f"chunks of {call.chunk} with window={call.window}, first key in {call.key_start}",
        ),
    ),
    _NO_DROPOUT,
)

KERNELS: dict[str, tuple[Requirement, ...]] = {"cudnn": _CUDNN, "tpu": _TPU, "xla": ()}
"""Kernel to what it needs, in the order in which "auto" tries them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """The kernel that runs, and why those before it in the table do not.

    Attributes:
        kernel: Name of the kernel.
        refused: (kernel, its reasons) of those that cannot run the call.
    """

    kernel: str
    refused: tuple[tuple[str, tuple[str, ...]], ...]

    def __str__(self) -> str:
        reasons = "; ".join(f"not {kernel}: {', '.join(why)}" for kernel, why in self.refused)
        return f"{self.kernel} ({reasons})" if reasons else self.kernel


def attention_choice(
    call: AttentionCall, implementation: str = "auto", device: Accelerator | None = None
) -> AttentionChoice:
    """Choose the kernel of a call.

    Args:
        call: The call.
        implementation: "auto" takes the first kernel of the table that can run it; a kernel's name takes that one.
        device: The device; None takes what `accelerator` finds.

    Returns:
        The choice.

    Raises:
        ValueError: If the implementation is unknown, or is a kernel that cannot run the call.
    """
    check_implementation("implementation", implementation)
    device = accelerator() if device is None else device
    reasons = {kernel: kernel_refusals(call, kernel, device) for kernel in KERNELS}
    if implementation == "auto":
        implementation = next(kernel for kernel, why in reasons.items() if not why)
    elif reasons[implementation]:
        raise ValueError(
            f"the attention kernel {implementation!r} cannot run this call: {', '.join(reasons[implementation])}. "
            "Pass 'auto' for the fastest kernel that can, or 'xla', which runs every call."
        )
    refused = tuple((kernel, why) for kernel, why in reasons.items() if why and kernel != implementation)
    return AttentionChoice(kernel=implementation, refused=refused)


def kernel_refusals(call: AttentionCall, kernel: str, device: Accelerator | None = None) -> tuple[str, ...]:
    """Say why a kernel cannot run a call.

    Args:
        call: The call.
        kernel: Name of the kernel.
        device: The device; None takes what `accelerator` finds.

    Returns:
        A reason for each requirement that is not met; none where it can.
    """
    device = accelerator() if device is None else device
    return tuple(filter(None, (need.refusal(call, device) for need in KERNELS[kernel])))


def check_implementation(argument: str, value: str) -> None:
    """Refuse an unknown implementation, naming the argument that carried it."""
    if value not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"{argument} must be one of {known}. Received: {argument}={value!r}")


def accelerator(mesh: Any = None) -> Accelerator:
    """Describe the devices of a mesh, which need not be here; of one without devices, the device of JAX' choice.

    Args:
        mesh: A concrete or planned mesh; None takes the one in context.

    Raises:
        ValueError: If the mesh is of GPUs that are not here: a description does not say what they can run.
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else getattr(mesh, "abstract_mesh", mesh)
    of_mesh = mesh.abstract_device
    if of_mesh is not None and of_mesh.platform != "gpu":
        return Accelerator(platform=of_mesh.platform)
    device = _default_device() if of_mesh is None else _gpu_of_kind(of_mesh.device_kind)
    if device.platform != "gpu":
        return Accelerator(platform=device.platform)
    if "cuda" not in device.client.platform_version.lower():
        return Accelerator(platform="rocm")
    major, _, minor = str(device.compute_capability).partition(".")
    return Accelerator(platform="cuda", capability=(int(major), int(minor or 0)), cudnn=_cudnn_version())


def _gpu_of_kind(kind: str) -> Any:
    """Find a GPU of this machine that is of a kind."""
    try:
        here = jax.devices("gpu")
    except RuntimeError:
        here = []
    found = next((device for device in here if device.device_kind == kind), None)
    if found is None:
        raise ValueError(
            f"The mesh is of GPUs that are described as {kind!r}, and no such GPU is here to ask what it can run. Say "
            "it: device=accelerator_named('cuda:9.0') of a report, --accelerator of dew plan. Trace programs where "
            "such a GPU is."
        )
    return found


def _default_device() -> Any:
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    return jax.devices(chosen)[0] if isinstance(chosen, str | None) else chosen


def _cudnn_version() -> int | None:
    """Ask JAX's CUDA plugin; it has no public name for this."""
    from jax._src.lib import cuda_versions

    return None if cuda_versions is None else cuda_versions.cudnn_get_version()


def kernel_table() -> str:
    """Write the table as Markdown: a row per requirement, kernels in the order in which "auto" tries them."""
    lines = ["| kernel | needs |", "|---|---|"]
    for kernel, needs in KERNELS.items():
        lines += [f"| `{kernel}` | {need.needs} |" for need in needs] or [f"| `{kernel}` | nothing |"]
    return "\n".join(lines)
