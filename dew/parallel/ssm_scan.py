"""Mamba-2's convolution and scan, on one device and on a mesh.

Entry point: `convolve_and_scan`. The prefix over the sequence axis, of `dew.parallel.scan_slices`, is of (total decay,
state), heads * (H * P + 1) float32 numbers a row: slices compose as (d1, s1), (d2, s2) -> (d1 d2, d2 s1 + s2). Reading
what came in costs 6 N H P operations a token, forward and backward, beside those of the scan.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from dew.arrays import Array, Bool, Float
from dew.kernels.ssd import read_state, remaining, ssd
from dew.parallel.scan_slices import ScanPlaces, Streams, convolved, earlier_slices, shifted_halo


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


def convolve_and_scan(
    mesh: Any,
    streams: Streams,
    dt: Float[Array, "B T N"],
    weights: ScanWeights,
    *,
    activation: Callable[[Array], Array],
    starts: Bool[Array, "B T"] | None = None,
    before: Streams | None = None,
    state: Float[Array, "B N H P"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N H P"] | None]:
    """Convolve the streams, activate them and scan.

    Heads split over tensor where they divide, and groups with them; where only the heads divide, every device holds
    all groups and reads its heads' own. Positions split over sequence unless there is something before them.

    Args:
        mesh: The mesh in context; None or an empty one means one device.
        streams: Projected values.
        dt: Step sizes.
        weights: Taps, biases, decays, skips.
        activation: Function of the convolved values.
        starts: Tokens that begin a document.
        before: The W - 1 tokens of each stream before the first; None means zeros.
        state: The state before the first token; None means zero.

    Returns:
        The outputs and the last state, float32; no state where positions are split.

    Raises:
        LayoutRefused: If the sequence axis does not divide the length, or leaves slices that are shorter than the
            reach of the convolution.
    """
    continues = before is not None or state is not None
    places = ScanPlaces(mesh, streams, weights.taps.x.shape[-1], splits_length=not continues)
    of_channels, of_heads = places.of_channels, places.of_heads
    specs = ScanWeights(of_channels, None if weights.biases is None else of_channels, of_heads, of_heads)
    compute = functools.partial(_scan_slice, places, activation)
    return places.run(compute, specs, streams, dt, weights, starts, before, state)


def _scan_slice(places, activation, streams, dt, weights, starts, before, state):
    """Compute one device's heads of its slice."""
    taps, slices = weights.taps, places.slices
    if slices > 1:
        before = shifted_halo(streams, starts, taps.x.shape[-1] - 1, slices)
    x, b, c = convolved(streams, taps, weights.biases, activation=activation, starts=starts, before=before)
    b, c = (places.own_groups(each, x.shape[2]) for each in (b, c))
    y, last = ssd(x, dt, weights.decay, b, c, skip=weights.skip, starts=starts, initial_state=state)
    if slices == 1:
        return y, last
    left = remaining(dt, weights.decay, starts)
    return y + read_state(c, left, _state_before(left[:, -1], last, slices)), None


def _state_before(decay: Float[Array, "B N"], state: Float[Array, "B N H P"], slices: int) -> Float[Array, "B N H P"]:
    """Give the state that all earlier slices leave.

    Args:
        decay: How much of a state the slice passes on.
        state: The state that the slice leaves when it begins with zero.
        slices: Size of the sequence axis.
    """
    own = jnp.concatenate([decay[..., None], state.reshape(*decay.shape, -1)], axis=-1)
    return earlier_slices(own, _composed, slices)[..., 1:].reshape(state.shape)


def _composed(earlier: Array, later: Array) -> Array:
    """Compose two slices, of each the decay and then the state."""
    passed = later[..., :1] * earlier
    return jnp.concatenate([passed[..., :1], later[..., 1:] + passed[..., 1:]], axis=-1)
