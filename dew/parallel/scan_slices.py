"""What scans over tokens share on a mesh: heads over tensor, positions over sequence, rows over the batch axes.

Entry points: `ScanPlaces`; `shifted_halo` and `earlier_slices` for a slice of a row. Over N slices go one shift of the
last W - 1 tokens that the convolution reads, and ceil(log2(N - 1)) + 1 shifts of what a slice makes of a state: a
parallel prefix (Hillis and Steele, https://doi.org/10.1145/7902.7903). `shift_bytes` counts them.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from dew.arrays import Array, Bool
from dew.kernels.causal_convolution import causal_convolution
from dew.placement.layout import LayoutRefused
from dew.placement.rules import DEFAULT_RULES, resolve

ROWS, LENGTH = "activation_batch", "activation_length"
HEADS, GROUPS = "activation_ssm_heads", "activation_ssm_groups"
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


NOTHING = Streams(None, None, None)


def convolved(
    streams: Streams,
    taps: Streams,
    biases: Streams | None = None,
    *,
    activation: Callable[[Array], Array],
    starts: Bool[Array, "B T"] | None = None,
    before: Streams | None = None,
) -> Streams:
    """Convolve and activate each stream.

    Args:
        streams: Projected values.
        taps: Taps of the convolution of each stream, [..., W].
        biases: Their biases, [...]; None means none.
        activation: Function of the convolved values.
        starts: Tokens that begin a document.
        before: The W - 1 tokens of each stream before the first; None means zeros.
    """

    def one(value: Array, taps: Array, bias: Array | None, earlier: Array | None) -> Array:
        mixed = causal_convolution(value, taps, earlier, starts)
        return activation(mixed if bias is None else mixed + bias.astype(mixed.dtype))

    return Streams(*map(one, streams, taps, biases or NOTHING, before or NOTHING))


def length_refusal(length: int, slices: int, taps: int) -> str | None:
    """Say why the sequence axis cannot cut rows of a length; None where it can. Arguments as `check_length`'s."""
    least = max(taps - 1, 1)
    if slices == 1 or (length % slices == 0 and length // slices >= least):
        return None
    reads = f" into slices of at least {least} tokens (their convolution reads as many back)" if taps > 1 else ""
    return (
        f"Layers with a state on sequence={slices} need a length that {slices} divides{reads}, which {length} is not."
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
    slices: int,
    *,
    rows: int,
    heads: int,
    head_dim: int,
    groups: int,
    state_size: int,
    taps: int,
    itemsize: int,
    transition: int = 1,
) -> tuple[int, int]:
    """Count what one device sends over the sequence axis in the forward pass of one layer.

    One shift of the halo, rows * (W - 1) * (heads * H + 2 * groups * P) values, and ceil(log2(slices - 1)) + 1 shifts
    of rows * heads * (H * P + transition) float32 numbers. The backward pass sends as many of each the other way.

    Args:
        slices: Size of the sequence axis.
        rows: Rows of a device.
        heads: Heads of a device.
        head_dim: Width H of a head.
        groups: Groups of a device.
        state_size: Width P of the state.
        taps: Taps W of the convolution.
        itemsize: Bytes of a number of the compute dtype.
        transition: Numbers that say what a slice makes of the state of a head: 1 where it decays as a whole.

    Returns:
        How many shifts, and their bytes.
    """
    if slices == 1:
        return 0, 0
    rounds = math.ceil(math.log2(slices - 1)) + 1
    halo = rows * (taps - 1) * (heads * head_dim + 2 * groups * state_size) * itemsize
    return (taps > 1) + rounds, halo + rounds * rows * heads * (head_dim * state_size + transition) * 4


class ScanPlaces:
    """Where the dimensions of one call are.

    Attributes:
        tokens: Mesh axes of the rows, positions and heads of what has [B, T, N, ...].
        channels: Mesh axes of the first dimension of channels of each stream.
        state: Of a state, [B, N, H, P].
        slices: Slices that a row is cut into.
    """

    def __init__(self, mesh: Any, streams: Streams, taps: int, *, splits_length: bool) -> None:
        """Resolve names on the axes of the mesh that no surrounding shard_map holds.

        Args:
            mesh: A mesh; None or an empty one means one device.
            streams: The values, or their shapes.
            taps: Taps W of the convolution.
            splits_length: Whether positions may split: nothing goes on from a state.

        Raises:
            LayoutRefused: If the sequence axis cannot cut the length, or the rules put it elsewhere.
        """
        self.mesh, self.splits_length = mesh, splits_length
        manual = set(getattr(mesh, "manual_axes", ()))
        self.is_one_device = mesh is None or mesh.empty or mesh.size == 1 or manual >= set(mesh.axis_names)
        self.free_axes = frozenset() if self.is_one_device else frozenset(mesh.axis_names) - manual
        B, T, N, _ = streams.x.shape
        if splits_length and SEQUENCE in self.free_axes:
            check_length(T, mesh.shape[SEQUENCE], taps)
        rows, length, heads = self._of((B, T, N), (ROWS, LENGTH, HEADS))
        if length not in (None, SEQUENCE):
            raise LayoutRefused(
                f"The rules put activation_length on {length!r}, but a scan splits positions over sequence "
                "alone. Use the rule ('activation_length', 'sequence')."
            )
        # Groups go where their heads go, or stay whole.
        G = streams.b.shape[2]
        groups = heads if G == N or self._of((B, T, G), (ROWS, LENGTH, GROUPS))[2] == heads else None
        self.tokens, self.channels = PartitionSpec(rows, length, heads), Streams(heads, groups, groups)
        self.state = PartitionSpec(rows, heads)
        self.slices = mesh.shape[SEQUENCE] if length == SEQUENCE else 1

    def _of(self, shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[Any, ...]:
        """Resolve names, giving an entry for every dimension."""
        if self.is_one_device:
            return (None,) * len(shape)
        kept = tuple(None if name == LENGTH and not self.splits_length else name for name in names)
        spec = resolve(kept, shape, self.mesh, nn.get_logical_axis_rules() or DEFAULT_RULES).spec
        return (*spec, *(None,) * (len(shape) - len(spec)))

    def parts(self, entry: Any) -> int:
        """Count the parts of a dimension that is on these axes."""
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def of_heads(self) -> PartitionSpec:
        """Of a weight of each head."""
        return PartitionSpec(self.channels.x)

    @property
    def of_channels(self) -> Streams:
        """Of a weight of each channel of the streams."""
        return Streams(*(PartitionSpec(entry) for entry in self.channels))

    def run(self, compute: Callable[..., Any], weight_specs: Any, *arguments: Any) -> Any:
        """Run each device's part of a scan.

        Args:
            compute: The part, from the arguments.
            weight_specs: Specs of the weights.
            *arguments: Streams, what drives the state by token and head, weights, tokens that begin a document, what
                is before the first token of each stream, and the state before it; None for those that are not there.

        Returns:
            The outputs, by token and head, and the last state; no state where positions are split.
        """
        if self.is_one_device:
            return compute(*arguments)
        rows, length, _ = self.tokens
        values = Streams(*(PartitionSpec(rows, length, entry) for entry in self.channels))
        before = None if arguments[4] is None else values
        return jax.shard_map(
            compute,
            in_specs=(values, self.tokens, weight_specs, PartitionSpec(rows, length), before, self.state),
            out_specs=(self.tokens, self.state if self.slices == 1 else None),
            axis_names=self.free_axes,
            check_vma=False,
        )(*arguments)

    def own_groups(self, array: Array, own_heads: int) -> Array:
        """Take what the device's heads read of an array with all groups, [B, T, G, P].

        Args:
            array: The array; given back where its groups are split as the heads are.
            own_heads: Heads of the device.

        Returns:
            The one group of all heads, or one for each head where they are not a whole block.
        """
        axes = self.channels.x
        if axes is None or self.channels.b is not None:
            return array
        heads_of_group = self.parts(axes) * own_heads // array.shape[2]
        first = jax.lax.axis_index(axes) * own_heads
        if heads_of_group % own_heads == 0:
            return jax.lax.dynamic_slice_in_dim(array, first // heads_of_group, 1, axis=2)
        return jnp.take(array, (first + jnp.arange(own_heads)) // heads_of_group, axis=2)


def shifted_halo(streams: Streams, starts: Array | None, reach: int, slices: int) -> Streams:
    """Give the last tokens of the slice before, zero where they are of another document than its last token."""
    if reach == 0:
        return Streams(*(value[:, :0] for value in streams))
    tails = [value[:, value.shape[1] - reach :].reshape(value.shape[0], reach, -1) for value in streams]
    packed = jnp.concatenate(tails, axis=-1)
    if starts is not None:
        documents = jnp.cumsum(starts, axis=1)
        packed = jnp.where((documents == documents[:, -1:])[:, -reach:, None], packed, 0)
    received = shift(packed, 1, slices)
    bounds = [tails[0].shape[-1], tails[0].shape[-1] + tails[1].shape[-1]]
    parts = jnp.split(received, bounds, axis=-1)
    return Streams(
        *(part.reshape(*part.shape[:2], *value.shape[2:]) for part, value in zip(parts, streams, strict=True))
    )


def earlier_slices(own: Array, compose: Callable[[Array, Array], Array], slices: int) -> Array:
    """Compose what all earlier slices make of a state, inside a shard_map that holds the sequence axis.

    What comes in before slice 0 is zero, transition and all: there is no state that it could pass on.

    Args:
        own: What the slice makes of one, in one array: the state that it leaves when it begins with zero, and how it
            passes an earlier one on.
        compose: Makes one of what two slices make, of the earlier one and the later one.
        slices: Size of the sequence axis.
    """
    before, distance = shift(own, 1, slices), 1
    while distance < slices - 1:
        before = compose(shift(before, distance, slices), before)
        distance *= 2
    return before


def shift(array: Array, distance: int, slices: int) -> Array:
    """Send to the slice `distance` further on; the first ones receive zeros."""
    return jax.lax.ppermute(array, SEQUENCE, [(place, place + distance) for place in range(slices - distance)])
