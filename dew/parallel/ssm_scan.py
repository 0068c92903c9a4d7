"""Mamba-2's convolution and scan on a mesh: heads over tensor, positions over sequence, rows over the batch axes.

Entry points: `convolve_and_scan` on one device, `sharded_convolve_and_scan` on a mesh. What crosses the sequence axis,
of N slices: one shift of the last W - 1 tokens that the convolution reads, and ceil(log2(N - 1)) + 1 shifts of (total
decay, state): a parallel prefix (Hillis and Steele, https://doi.org/10.1145/7902.7903). `shift_bytes` counts them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from dew.arrays import Array, Bool, Float
from dew.kernels.causal_convolution import causal_convolution
from dew.kernels.ssd import read_state, remaining, ssd
from dew.placement.layout import LayoutRefused
from dew.placement.rules import DEFAULT_RULES, resolve

ROWS, LENGTH = "activation_batch", "activation_length"
HEADS, GROUPS = "activation_ssm_heads", "activation_ssm_groups"
STATE_NAMES = (ROWS, HEADS, None, None)
"""Names of a state, [B, N, H, P]."""
SEQUENCE = "sequence"


class Streams(NamedTuple):
    """Something of each of the three streams that are convolved, such as their values, taps or last tokens.

    Attributes:
        x: Of the values, with dimensions [N, H] of channels.
        b: Of what is written to the state, with [G, P].
        c: Of what is read from it, with [G, P].
    """

    x: Any
    b: Any
    c: Any


class ScanWeights(NamedTuple):
    """The weights between the projections.

    Attributes:
        taps: Taps of the convolution of each stream, [..., W].
        biases: Their biases, [...]; None means none.
        decay: Rate of each head, negative, [N].
        skip: Factor of a token's own value, [N].
    """

    taps: Streams
    biases: Streams | None
    decay: Any
    skip: Any


def convolved(
    streams: Streams,
    weights: ScanWeights,
    *,
    activation: Callable[[Array], Array],
    starts: Bool[Array, "B T"] | None = None,
    before: Streams | None = None,
) -> Streams:
    """Convolve and activate each stream; arguments as `convolve_and_scan`'s."""

    def one(value: Array, taps: Array, bias: Array | None, earlier: Array | None) -> Array:
        mixed = causal_convolution(value, taps, earlier, starts)
        return activation(mixed if bias is None else mixed + bias.astype(mixed.dtype))

    nothing = Streams(None, None, None)
    return Streams(*map(one, streams, weights.taps, weights.biases or nothing, before or nothing))


Scanned = tuple[Float[Array, "B T N H"], Float[Array, "B N H P"] | None]


def convolve_and_scan(
    streams: Streams,
    dt: Float[Array, "B T N"],
    weights: ScanWeights,
    *,
    activation: Callable[[Array], Array],
    starts: Bool[Array, "B T"] | None = None,
    before: Streams | None = None,
    state: Float[Array, "B N H P"] | None = None,
) -> Scanned:
    """Convolve the streams, activate them and scan, on one device.

    Args:
        streams: Projected values.
        dt: Step sizes.
        weights: Taps, biases, decays, skips.
        activation: Function of the convolved values.
        starts: Tokens that begin a document.
        before: The W - 1 tokens of each stream before the first; None means zeros.
        state: The state before the first token; None means zero.

    Returns:
        The outputs and the last state, float32.
    """
    x, b, c = convolved(streams, weights, activation=activation, starts=starts, before=before)
    return ssd(x, dt, weights.decay, b, c, skip=weights.skip, starts=starts, initial_state=state)


def sharded_convolve_and_scan(
    mesh: Any,
    streams: Streams,
    dt: Float[Array, "B T N"],
    weights: ScanWeights,
    *,
    activation: Callable[[Array], Array],
    starts: Bool[Array, "B T"] | None = None,
    before: Streams | None = None,
    state: Float[Array, "B N H P"] | None = None,
) -> Scanned:
    """Convolve and scan on a mesh; further arguments as `convolve_and_scan`'s.

    Heads split over tensor where they divide, and groups with them; where only the heads divide, every device holds
    all groups and reads its heads' own. Positions split over sequence unless there is something before them.

    Args:
        mesh: The mesh in context; None or an empty one means one device.

    Returns:
        The outputs and the last state, float32; no state where positions are split.

    Raises:
        LayoutRefused: If the sequence axis does not divide the length, or leaves slices that are shorter than the
            reach of the convolution.
    """
    if mesh is None or mesh.empty or mesh.size == 1 or set(mesh.manual_axes) >= set(mesh.axis_names):
        return convolve_and_scan(streams, dt, weights, activation=activation, starts=starts, before=before, state=state)
    specs = ScanSpecs(mesh, streams, weights.taps.x.shape[-1], splits_length=before is None and state is None)
    arguments = (streams, dt, weights, starts, before, state)
    run = jax.shard_map(
        functools.partial(_scan_slice, specs, activation),
        in_specs=specs.inputs(*arguments),
        out_specs=(PartitionSpec(*specs.tokens, None), specs.state if specs.slices == 1 else None),
        axis_names=specs.free_axes,
        check_vma=False,
    )
    return run(*arguments)


def length_refusal(length: int, slices: int, taps: int) -> str | None:
    """Say why the sequence axis cannot cut rows of a length; None where it can. Arguments as `check_length`'s."""
    least = max(taps - 1, 1)
    if slices == 1 or (length % slices == 0 and length // slices >= least):
        return None
    return (
        f"Layers with a state on sequence={slices} need a length that {slices} divides into slices of at least {least} "
        f"tokens (their convolution reads {least} tokens back), which {length} is not."
    )


def check_length(length: int, slices: int, taps: int) -> None:
    """Refuse a length that the sequence axis cannot cut.

    Args:
        length: Tokens of a row.
        slices: Size of the sequence axis.
        taps: Taps W of the convolution.

    Raises:
        LayoutRefused: Naming the nearest length that works.
    """
    refusal = length_refusal(length, slices, taps)
    if refusal is not None:
        nearest = max(round(length / slices), taps - 1, 1) * slices
        raise LayoutRefused(f"{refusal} The nearest such length is {nearest}. Received: length={length}")


def shift_bytes(
    slices: int, *, rows: int, heads: int, head_dim: int, groups: int, state_size: int, taps: int, itemsize: int
) -> tuple[int, int]:
    """Count what one device sends over the sequence axis in the forward pass of one layer.

    One shift of the halo, rows * (W - 1) * (heads * H + 2 * groups * P) values, and ceil(log2(slices - 1)) + 1 shifts
    of rows * heads * (H * P + 1) float32 numbers. The backward pass sends as many of each the other way.

    Args:
        slices: Size of the sequence axis.
        rows: Rows of a device.
        heads: Heads of a device.
        head_dim: Width H of a head.
        groups: Groups of a device.
        state_size: Width P of the state.
        taps: Taps W of the convolution.
        itemsize: Bytes of a number of the compute dtype.

    Returns:
        How many shifts, and their bytes.
    """
    if slices == 1:
        return 0, 0
    rounds = math.ceil(math.log2(slices - 1)) + 1
    halo = rows * (taps - 1) * (heads * head_dim + 2 * groups * state_size) * itemsize
    return (taps > 1) + rounds, halo + rounds * rows * heads * (head_dim * state_size + 1) * 4


class ScanSpecs:
    """Where the dimensions of one call are."""

    def __init__(self, mesh: Any, streams: Streams, taps: int, *, splits_length: bool) -> None:
        """Resolve names on the axes of the mesh that no surrounding shard_map holds."""
        self.mesh, self.splits_length = mesh, splits_length
        self.rules = nn.get_logical_axis_rules() or DEFAULT_RULES
        self.free_axes = frozenset(mesh.axis_names) - set(mesh.manual_axes)
        B, T, N, _ = streams.x.shape
        if splits_length and SEQUENCE in self.free_axes:
            check_length(T, mesh.shape[SEQUENCE], taps)
        self.tokens = self.of((B, T, N), (ROWS, LENGTH, HEADS))
        if self.tokens[1] not in (None, SEQUENCE):
            raise LayoutRefused(
                f"The rules put activation_length on {self.tokens[1]!r}, but a scan splits positions over sequence "
                "alone. Use the rule ('activation_length', 'sequence')."
            )
        groups = self.of((B, T, *streams.b.shape[2:]), (ROWS, LENGTH, GROUPS, None))
        # Groups go where their heads go, or stay whole.
        self.groups = groups[2] if groups[2] == self.tokens[2] else None
        self.state = PartitionSpec(self.tokens[0], self.tokens[2], None, None)

    def of(self, shape: tuple[int, ...], names: tuple[str | None, ...]) -> PartitionSpec:
        """Resolve names, giving an entry for every dimension."""
        names = tuple(None if name == LENGTH and not self.splits_length else name for name in names)
        spec = resolve(names, shape, self.mesh, self.rules).spec
        return PartitionSpec(*spec, *(None,) * (len(shape) - len(spec)))

    @property
    def slices(self) -> int:
        """Slices that a row is cut into."""
        return self.mesh.shape[SEQUENCE] if self.tokens[1] == SEQUENCE else 1

    def inputs(self, streams, dt, weights, starts, before, state) -> tuple[Any, ...]:
        """Give the specs of the arguments."""
        rows, length, heads = self.tokens
        channels = Streams(heads, self.groups, self.groups)
        values = Streams(*(PartitionSpec(rows, length, split, None) for split in channels))
        weight = ScanWeights(
            taps=Streams(*(PartitionSpec(split, None, None) for split in channels)),
            biases=None if weights.biases is None else Streams(*(PartitionSpec(split, None) for split in channels)),
            decay=PartitionSpec(heads),
            skip=PartitionSpec(heads),
        )
        return (
            values,
            self.tokens,
            weight,
            None if starts is None else PartitionSpec(rows, length),
            None if before is None else values,
            None if state is None else self.state,
        )


def _scan_slice(specs, activation, streams, dt, weights, starts, before, state):
    """Compute one device's heads of its slice."""
    slices = specs.slices
    if slices > 1:
        before = shifted_halo(streams, starts, weights.taps.x.shape[-1] - 1, slices)
    x, b, c = convolved(streams, weights, activation=activation, starts=starts, before=before)
    if specs.tokens[2] is not None and specs.groups is None:
        b, c = (_own_groups(each, x.shape[2], specs) for each in (b, c))
    y, last = ssd(x, dt, weights.decay, b, c, skip=weights.skip, starts=starts, initial_state=state)
    if slices == 1:
        return y, last
    left = remaining(dt, weights.decay, starts)
    return y + read_state(c, left, state_before(left[:, -1], last, slices)), None


def _own_groups(array: Float[Array, "B T G P"], own_heads: int, specs: ScanSpecs) -> Array:
    """Take the groups that the device's heads read, one for each head where they are not a whole block."""
    axes = specs.tokens[2]
    total = math.prod(specs.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes)) * own_heads
    heads_of_group = total // array.shape[2]
    first = jax.lax.axis_index(axes) * own_heads
    if heads_of_group % own_heads == 0:
        return jax.lax.dynamic_slice_in_dim(array, first // heads_of_group, 1, axis=2)
    return jnp.take(array, (first + jnp.arange(own_heads)) // heads_of_group, axis=2)


def shifted_halo(streams: Streams, starts: Array | None, reach: int, slices: int) -> Streams:
    """Give the last tokens of the slice before, zero where they are of another document than its last token."""
    if reach == 0:
        return Streams(*(value[:, :0] for value in streams))
    own = None
    if starts is not None:
        documents = jnp.cumsum(starts, axis=1)
        own = (documents == documents[:, -1:])[:, -reach:, None]
    tails = [value[:, value.shape[1] - reach :].reshape(value.shape[0], reach, -1) for value in streams]
    packed = jnp.concatenate(tails, axis=-1)
    if own is not None:
        packed = jnp.where(own, packed, 0)
    received = shift(packed, 1, slices)
    bounds = [tails[0].shape[-1], tails[0].shape[-1] + tails[1].shape[-1]]
    parts = jnp.split(received, bounds, axis=-1)
    return Streams(
        *(part.reshape(*part.shape[:2], *value.shape[2:]) for part, value in zip(parts, streams, strict=True))
    )


def state_before(total: Float[Array, "B N"], state: Float[Array, "B N H P"], slices: int) -> Float[Array, "B N H P"]:
    """Give the state that all earlier slices leave, inside a shard_map that holds the sequence axis.

    Slices compose as (d1, s1), (d2, s2) -> (d1 d2, d2 s1 + s2). What comes in before slice 0 is zero, decay and all:
    there is no state that it could pass on.

    Args:
        total: How much of a state the slice passes on.
        state: The state that the slice leaves when it begins with zero.
        slices: Size of the sequence axis.
    """
    B, N, H, P = state.shape
    total, state = _unpacked(shift(_packed(total, state), 1, slices), (B, N, H, P))
    distance = 1
    while distance < slices - 1:
        earlier_total, earlier = _unpacked(shift(_packed(total, state), distance, slices), (B, N, H, P))
        total, state = total * earlier_total, state + total[..., None, None] * earlier
        distance *= 2
    return state


def _packed(total: Array, state: Array) -> Array:
    """Lay a pair out as one array, which goes in one shift."""
    return jnp.concatenate([total[..., None], state.reshape(*total.shape, -1)], axis=-1)


def _unpacked(packed: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    return packed[..., 0], packed[..., 1:].reshape(shape)


def shift(array: Array, distance: int, slices: int) -> Array:
    """Send to the slice `distance` further on; the first ones receive zeros."""
    return jax.lax.ppermute(array, SEQUENCE, [(place, place + distance) for place in range(slices - distance)])
