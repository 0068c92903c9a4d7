"""Which exchange an attention call on a sequence mesh takes: rules first, bytes where the rules leave a choice.

Entry points: `choose_exchange`, a pure function of the call's sizes and the device; `exchange_refusal`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from dew.kernels.attention_choice import (
    KERNELS,
    Accelerator,
    AttentionCall,
    AttentionChoice,
    Implementation,
    attention_choice,
    check_implementation,
    kernel_refusals,
)
from dew.parallel.banded import banded_reach, banded_transfers, is_alike
from dew.parallel.gather import gather_transfers
from dew.parallel.ring import ring_stripes, ring_transfers
from dew.parallel.row_lengths import length_advice
from dew.parallel.traffic import AttentionSizes, Transfer, sent_bytes
from dew.parallel.ulysses import traded_kv_heads, ulysses_transfers
from dew.placement.layout import LayoutRefused

Path = Literal["all_to_all", "gather", "ring", "banded"]
SequenceImplementation = Literal["auto", "all_to_all", "gather", "ring", "banded"]
"""What a user may name: one exchange for every call, or the choice per call."""

_TRANSFERS: Mapping[Path, Callable[[AttentionSizes], tuple[Transfer, ...]]] = {
    "all_to_all": ulysses_transfers,
    "gather": gather_transfers,
    "ring": ring_transfers,
    "banded": banded_transfers,
}


_PIECEWISE = ("gather", "ring")
LARGEST_TILE = 128
"""Kernels need lengths of a multiple of this at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The exchange of one call.

    Attributes:
        path: Which.
        reason: Why this one.
        kernel: Which kernel attends inside it, and why not another.
        transfers: What it sends.
        refused: Why each exchange that cannot run this call cannot.
        alternatives: Bytes of the others that can.
    """

    path: Path
    reason: str
    kernel: AttentionChoice
    transfers: tuple[Transfer, ...]
    refused: Mapping[Path, str]
    alternatives: Mapping[Path, int]

    @property
    def bytes(self) -> int:
        """Bytes a device sends, forward and backward."""
        return sent_bytes(self.transfers)

    def __str__(self) -> str:
        others = [f"{path} would send {size:,}" for path, size in self.alternatives.items()]
        refused = [f"{path} cannot: {reason}" for path, reason in self.refused.items()]
        why = "; ".join([self.reason, *others, *refused])
        return f"{self.path}, {self.bytes:,} bytes a device ({why}); kernel {self.kernel}"


def choose_exchange(
    sizes: AttentionSizes,
    named: SequenceImplementation = "auto",
    *,
    implementation: Implementation = "auto",
    device: Accelerator | None = None,
) -> Choice:
    """Choose how one attention call is exchanged.

    An exchange that leaves a device what a kernel named cannot run is out. Of the others, a window or chunks that reach
    into one slice at most take the banded path, unless the kernel skips what a window hides. Otherwise a call takes the
    all-to-all where its heads divide, because its kernel sees whole rows and skips what order hides. Heads too few to
    trade leave the gather, or the ring where that ends early enough to send less.

    Args:
        sizes: The call.
        named: An exchange to take; "auto" chooses.
        implementation: Kernel of `dew.kernels.attention` to take; "auto" chooses.
        device: The device; None takes what `accelerator` finds.

    Returns:
        The choice.

    Raises:
        LayoutRefused: If the exchange named, or none at all, can run the call, with every reason and lengths that work.
    """
    refused = _refusals(sizes, implementation, device)
    costs = {path: sent_bytes(find(sizes)) for path, find in _TRANSFERS.items() if path not in refused}
    refusal = _refusal_text(sizes, named, implementation, refused)
    if refusal is not None:
        raise LayoutRefused(f"{refusal} Use {_ways_out(sizes, named, implementation, device, costs)}.")
    if named != "auto":
        path, reason = named, "named by sequence_impl"
    else:
        path, reason = _preferred(costs, skips_window(sizes, implementation, device))
    return Choice(
        path=path,
        reason=reason,
        kernel=_kernel(path, sizes, implementation, device),
        transfers=_TRANSFERS[path](sizes),
        refused=refused,
        alternatives={other: cost for other, cost in costs.items() if other != path},
    )


def exchange_refusal(
    sizes: AttentionSizes,
    named: SequenceImplementation = "auto",
    *,
    implementation: Implementation = "auto",
    device: Accelerator | None = None,
) -> str | None:
    """Say why `choose_exchange` refuses a call, without what works instead; None where it does not."""
    refused = {}
    for path in _TRANSFERS if named == "auto" else (named,):
        reason = _refusal(path, sizes) or _kernel_refusal(path, sizes, implementation, device)
        if reason is None:
            return None
        refused[path] = reason
    return _refusal_text(sizes, named, implementation, refused)


def skips_window(sizes: AttentionSizes, implementation: Implementation, device: Accelerator | None = None) -> bool:
    """Say whether the kernel of the all-to-all, which sees whole rows, skips what a window hides.

    Args:
        sizes: The call.
        implementation: Kernel to take; "auto" chooses.
        device: The device; None takes what `accelerator` finds.
    """
    if sizes.window is None or sizes.num_heads % sizes.shards:
        return False
    if _kernel_refusal("all_to_all", sizes, implementation, device):
        return False
    kernel = _kernel("all_to_all", sizes, implementation, device).kernel
    # cuDNN has a window of its own, but documents make it read an explicit mask; the TPU kernel skips by any mask.
    return kernel == "tpu" or (kernel == "cudnn" and not sizes.is_masked and sizes.chunk is None)


def checked_sequence_implementation(value: str) -> SequenceImplementation:
    """Check what a user named.

    Args:
        value: The name.

    Raises:
        ValueError: If no exchange has it.
    """
    known = get_args(SequenceImplementation)
    if value not in known:
        raise ValueError(
            f"sequence_impl must be one of {', '.join(map(repr, known))}. Received: sequence_impl={value!r}"
        )
    return value  # type: ignore[return-value]


def with_length(sizes: AttentionSizes, length: int) -> AttentionSizes:
    """Give the same call on rows of another length."""
    return dataclasses.replace(sizes, num_queries=length, num_keys=length)


def _refusal_text(
    sizes: AttentionSizes, named: SequenceImplementation, implementation: Implementation, refused: Mapping[Path, str]
) -> str | None:
    if named != "auto":
        reason = refused.get(named)
        return None if reason is None else f"sequence_impl={named!r} cannot run this attention: {reason}."
    if len(refused) < len(_TRANSFERS):
        return None
    kernel = "" if implementation == "auto" else f" with attention_impl={implementation!r}"
    reasons = "; ".join(f"{path} cannot: {reason}" for path, reason in refused.items())
    return (
        f"No exchange runs the attention of rows of {sizes.num_queries} positions on a mesh with "
        f"sequence={sizes.shards}{kernel}: {reasons}."
    )


def _ways_out(
    sizes: AttentionSizes,
    named: SequenceImplementation,
    implementation: Implementation,
    device: Accelerator | None,
    costs: Mapping[Path, int],
) -> str:
    """List what would run in place of a refused call, each of them tried."""

    def runs(length: int, kernel: Implementation) -> bool:
        return exchange_refusal(with_length(sizes, length), named, implementation=kernel, device=device) is None

    spans = [span for span in (sizes.window, sizes.chunk) if span is not None]
    # Beyond this no rule becomes true: slices as long as a window or chunk, and of several tiles of a kernel.
    largest = sizes.num_queries + sizes.shards * max(2 * LARGEST_TILE, *spans, 0)
    ways = [f"sequence_impl={' or '.join(repr(path) for path in ('auto', *costs))}"] if costs else []
    if implementation != "auto" and runs(sizes.num_queries, "auto"):
        ways.append("attention_impl='auto'")
    rows = length_advice(
        sizes.num_queries, lambda length: runs(length, implementation), step=sizes.shards, largest=largest
    )
    ways += [rows] if rows else []
    return ", or ".join(ways) or f"a mesh without sequence={sizes.shards}"


def _refusals(sizes: AttentionSizes, implementation: Implementation, device: Accelerator | None) -> dict[Path, str]:
    """Say why each exchange that cannot run a call cannot."""
    found = {path: _refusal(path, sizes) or _kernel_refusal(path, sizes, implementation, device) for path in _TRANSFERS}
    return {path: reason for path, reason in found.items() if reason}


def _preferred(costs: Mapping[Path, int], kernel_skips_window: bool) -> tuple[Path, str]:
    if "banded" in costs and not (kernel_skips_window and "all_to_all" in costs):
        return "banded", "what a token reads reaches into one slice at most"
    if "all_to_all" in costs:
        return "all_to_all", "the heads divide, and its kernel skips what is hidden"
    path = min(costs, key=lambda path: costs[path])
    return path, f"heads too few to trade; {'sends least' if len(costs) > 1 else 'nothing else runs'}"


def _parts(path: Path, sizes: AttentionSizes) -> int:
    """Count the equal parts into which a slice is cut."""
    stripes = path == "gather" or (path == "ring" and ring_stripes(sizes.window, sizes.chunk))
    return 2 if stripes else 1


def _refusal(path: Path, sizes: AttentionSizes) -> str | None:
    """Say why an exchange cannot run a call; None where it can."""
    parts = sizes.shards * _parts(path, sizes)
    if sizes.num_queries % parts:
        return f"{sizes.num_queries} positions do not divide into {parts} equal parts"
    if path == "all_to_all" and sizes.num_keys % sizes.shards:
        return f"{sizes.num_keys} keys do not divide over sequence={sizes.shards}"
    if path == "all_to_all" and sizes.num_heads % sizes.shards:
        return f"{sizes.num_heads} query heads of a tensor shard do not divide over sequence={sizes.shards}"
    if path == "banded":
        return _band_refusal(sizes)
    return None


def _band_refusal(sizes: AttentionSizes) -> str | None:
    reach = banded_reach(sizes.slice_length, sizes.shards, sizes.window, sizes.chunk)
    if reach is None:
        return "it needs a window or chunks"
    if reach > sizes.slice_length:
        return (
            f"a token reads {reach} positions before its slice, which is longer than the slice of {sizes.slice_length}"
        )
    return None


def _kernel_refusal(
    path: Path, sizes: AttentionSizes, implementation: Implementation, device: Accelerator | None
) -> str | None:
    """Say why a kernel named cannot run what an exchange leaves on a device; None where it can."""
    check_implementation("attention_impl", implementation)
    if implementation in ("auto", "xla"):
        return None
    if path in _PIECEWISE:
        return f"it attends piece by piece, which attention_impl={implementation!r} does not"
    reasons = kernel_refusals(_call(path, sizes), implementation, device)
    return f"what it leaves attention_impl={implementation!r} cannot run: {', '.join(reasons)}" if reasons else None


def _kernel(
    path: Path, sizes: AttentionSizes, implementation: Implementation, device: Accelerator | None
) -> AttentionChoice:
    """Give the kernel that attends inside an exchange that can run the call."""
    if path in _PIECEWISE:
        why = ("the exchange attends piece by piece",)
        return AttentionChoice(kernel="xla", refused=tuple((name, why) for name in KERNELS if name != "xla"))
    return attention_choice(_call(path, sizes), implementation, device)


def _call(path: Path, sizes: AttentionSizes) -> AttentionCall:
    """Describe what one device computes once it has received its operands."""
    traded = AttentionCall(
        rows=sizes.rows,
        num_queries=sizes.num_queries,
        num_keys=sizes.num_keys,
        num_heads=sizes.num_heads // sizes.shards,
        num_kv_heads=traded_kv_heads(sizes.num_kv_heads, sizes.shards) // sizes.shards,
        head_dim=sizes.head_dim,
        dtype=sizes.dtype,
        window=sizes.window,
        chunk=sizes.chunk,
        segments=sizes.is_masked,
        softcap=sizes.has_softcap,
        sinks=sizes.has_sinks,
        dropout=sizes.has_dropout,
    )
    if path == "all_to_all":
        return traded
    reach = banded_reach(sizes.slice_length, sizes.shards, sizes.window, sizes.chunk)
    assert path == "banded", "the others attend piece by piece"
    assert reach is not None, "only a window or chunks make a band"
    return dataclasses.replace(
        traded,
        num_queries=sizes.slice_length,
        num_keys=sizes.slice_length + reach,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        offset=reach if is_alike(reach, sizes.chunk) else None,
        key_start=0 if is_alike(reach, sizes.chunk) else None,
        segments=sizes.is_masked or reach > 0,
    )
