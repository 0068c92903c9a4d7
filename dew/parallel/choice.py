"""Which exchange an attention call on a sequence mesh takes: rules first, bytes where the rules leave a choice.

Entry point: `choose_exchange`, a pure function of the call's sizes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from dew.kernels.attention_choice import Accelerator, AttentionCall, Implementation, attention_choice
from dew.parallel.banded import banded_reach, banded_transfers
from dew.parallel.gather import gather_transfers
from dew.parallel.ring import ring_stripes, ring_transfers
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The exchange of one call.

    Attributes:
        path: Which.
        reason: Why this one.
        transfers: What it sends.
        bytes: Bytes a device sends, forward and backward.
        refused: Why each exchange that cannot run this call cannot.
        alternatives: Bytes of the others that can.
    """

    path: Path
    reason: str
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
        return f"{self.path}, {self.bytes:,} bytes a device ({'; '.join([self.reason, *others, *refused])})"


def choose_exchange(
    sizes: AttentionSizes, named: SequenceImplementation = "auto", *, kernel_skips_window: bool = False
) -> Choice:
    """Choose how one attention call is exchanged.

    A window or chunks that reach into one slice at most take the banded path, unless the kernel skips what a window
    hides. Otherwise a call takes the all-to-all where its heads divide, because its kernel sees whole rows and skips
    what order hides; a call that nothing is hidden from takes whichever sends fewer bytes. Heads too few to trade leave
    the gather, or the ring where that ends early enough to send less.

    Args:
        sizes: The call.
        named: An exchange to take; "auto" chooses.
        kernel_skips_window: Whether the kernel has a window of its own for this call.

    Returns:
        The choice.

    Raises:
        LayoutRefused: If the exchange named, or none at all, can run the call.
    """
    refused: dict[Path, str] = {path: reason for path in _TRANSFERS if (reason := _refusal(path, sizes))}
    costs = {path: sent_bytes(find(sizes)) for path, find in _TRANSFERS.items() if path not in refused}
    if named != "auto":
        if named in refused:
            raise LayoutRefused(
                f"sequence_impl={named!r} cannot run this attention: {refused[named]}. "
                f"Use {' or '.join(repr(path) for path in ('auto', *costs))}."
            )
        path, reason = named, "named by sequence_impl"
    elif not costs:
        raise LayoutRefused(refused_length(sizes.num_queries, sizes.shards, _least_parts(sizes)))
    else:
        path, reason = _preferred(sizes, costs, kernel_skips_window)
    return Choice(
        path=path,
        reason=reason,
        transfers=_TRANSFERS[path](sizes),
        refused=refused,
        alternatives={other: cost for other, cost in costs.items() if other != path},
    )


def skips_window(sizes: AttentionSizes, implementation: Implementation, device: Accelerator | None = None) -> bool:
    """Say whether the kernel of the all-to-all, which sees whole rows, skips what a window hides.

    Args:
        sizes: The call.
        implementation: Kernel to take; "auto" chooses.
        device: The device; None means the one that programs run on by default.
    """
    if sizes.window is None or sizes.num_heads % sizes.shards:
        return False
    call = AttentionCall(
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
    )
    kernel = attention_choice(call, implementation, device).kernel
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


def refused_length(length: int, shards: int, parts: int) -> str:
    """Say which lengths near a refused one work.

    Args:
        length: Positions of a row.
        shards: Devices of the sequence axis.
        parts: Equal parts of a slice that a call needs.
    """
    step = shards * parts
    below = length // step * step
    works = " or ".join(str(size) for size in (below, below + step) if size)
    return (
        f"Rows of {length} positions do not divide into {step} equal parts, which attention on a mesh with "
        f"sequence={shards} needs. Use rows of {works} positions."
    )


def _preferred(sizes: AttentionSizes, costs: Mapping[Path, int], kernel_skips_window: bool) -> tuple[Path, str]:
    trades = "all_to_all" in costs
    if "banded" in costs and not (kernel_skips_window and trades):
        return "banded", "what a token reads reaches into one slice at most"
    if trades and (sizes.is_causal or sizes.is_masked):
        return "all_to_all", "the heads divide, and its kernel skips what is hidden"
    open_to = [path for path in costs if path != "banded"]
    path = min(open_to, key=lambda path: costs[path])
    few = "" if trades else "heads too few to trade; "
    return path, f"{few}sends least" if len(open_to) > 1 else f"{few}nothing else runs"


def _least_parts(sizes: AttentionSizes) -> int:
    """Count the equal parts of a slice that the least demanding exchange of this call needs."""
    even = dataclasses.replace(sizes, num_queries=sizes.shards * 2**20, num_keys=sizes.shards * 2**20)
    return 1 if any(_refusal(path, even) is None and _parts(path, sizes) == 1 for path in _TRANSFERS) else 2


def _parts(path: Path, sizes: AttentionSizes) -> int:
    """Count the equal parts into which a slice is cut."""
    stripes = path == "gather" or (path == "ring" and ring_stripes(sizes.window, sizes.chunk))
    return 2 if stripes and (sizes.is_causal or sizes.is_masked) else 1


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
