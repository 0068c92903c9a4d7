"""The convolution and delta rule of gated delta nets, on one device and on a mesh.

Entry point: `convolve_and_correct`. The prefix over the sequence axis, of `dew.parallel.scan_slices`, is of (state,
transition), keys * R * (H * P + P * P) float32 numbers a row: slices compose as (s1, m1), (s2, m2) -> (s1 m2 + s2,
m1 m2).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dew.arrays import Array, Bool, Float
from dew.kernels.delta_rule import delta_rule, unit
from dew.parallel.scan_slices import ScanPlaces, Streams, convolved, earlier_slices, shifted_halo


class Gates(NamedTuple):
    """What a token does to the state, for each of the R heads of each of the G keys.

    Attributes:
        log_decay: Log of what it leaves of the state, [B, T, G, R].
        beta: Part of the correction that it makes, [B, T, G, R].
    """

    log_decay: Any
    beta: Any


def convolved_heads(
    streams: Streams,
    taps: Streams,
    *,
    activation: Callable[[Array], Array],
    heads: int,
    starts: Bool[Array, "B T"] | None = None,
    before: Streams | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T G P"], Float[Array, "B T G P"]]:
    """Convolve and activate each stream, tell values apart by head, give keys and queries their lengths.

    Args:
        streams: As `convolve_and_correct`'s, as are the others.
        taps: Taps of the convolution of each stream, [..., W].
        activation: Function of the convolved values.
        heads: Heads R of a key.
        starts: Tokens that begin a document.
        before: The W - 1 tokens before the first.

    Returns:
        Values, keys of length 1 and queries of length P ** -0.5.
    """
    values, keys, queries = convolved(streams, taps, activation=activation, starts=starts, before=before)
    B, T, G, _ = values.shape
    return values.reshape(B, T, G * heads, -1), unit(keys), unit(queries) * queries.shape[-1] ** -0.5


def convolve_and_correct(
    mesh: Any,
    streams: Streams,
    gates: Gates,
    taps: Streams,
    *,
    activation: Callable[[Array], Array],
    starts: Bool[Array, "B T"] | None = None,
    before: Streams | None = None,
    state: Float[Array, "B G RH P"] | None = None,
) -> tuple[Float[Array, "B T G RH"], Float[Array, "B G RH P"] | None]:
    """Convolve the streams, activate them and run the delta rule.

    Keys split over tensor where they divide, each with its heads. Positions split over sequence unless there is
    something before them. With the transition, heads of a slice cost what heads of H + P do on one device; besides,
    forward and backward, reading what came in costs 6 N H P operations a token, each composition 6 N (H + P) P P a row.

    Args:
        mesh: The mesh in context; None or an empty one means one device.
        streams: Projected values (`x`), the R heads of a key side by side, keys (`b`) and queries (`c`).
        gates: What each token does to the state.
        taps: Taps of the convolution of each stream, [..., W].

    Further arguments, results and errors are those of `dew.parallel.ssm_scan.convolve_and_scan`.
    """
    continues = before is not None or state is not None
    places = ScanPlaces(mesh, streams, taps.x.shape[-1], splits_length=not continues)
    compute = functools.partial(_correct_slice, places.slices, activation)
    return places.run(compute, places.of_channels, streams, gates, taps, starts, before, state)


def _correct_slice(slices, activation, streams, gates, taps, starts, before, state):
    """Compute one device's keys and heads of its slice."""
    B, T, G, heads = gates.beta.shape
    if slices > 1:
        before = shifted_halo(streams, starts, taps.x.shape[-1] - 1, slices)
    values, keys, queries = convolved_heads(
        streams, taps, activation=activation, heads=heads, starts=starts, before=before
    )
    H, P = values.shape[-1], keys.shape[-1]
    log_decay, beta = (each.reshape(B, T, G * heads) for each in gates)
    initial = None if state is None else state.reshape(B, G * heads, H, P)
    if slices > 1:
        # The rule is linear in state and values. P further rows, which begin as the identity and write nothing, become
        # what the slice makes of a state, and their outputs what each token would read of it: it is known later.
        values = jnp.pad(values.astype(jnp.float32), [(0, 0)] * 3 + [(0, P)])
        initial = jnp.broadcast_to(jnp.pad(jnp.eye(P), ((H, 0), (0, 0))), (B, G * heads, H + P, P))
    y, last = delta_rule(values, keys, queries, log_decay, beta, starts=starts, initial_state=initial)
    if slices == 1:
        return y.reshape(B, T, G, -1), last.reshape(B, G, -1, P)
    incoming = earlier_slices(last, functools.partial(_composed, H), slices)[..., :H, :]
    y = y[..., :H] + jnp.einsum("BNHP,BTNP->BTNH", incoming, y[..., H:])
    return y.reshape(B, T, G, -1), None


def _composed(H: int, earlier: Float[Array, "B N HP P"], later: Float[Array, "B N HP P"]) -> Array:
    """Compose two slices, of each the state, [H, P], above the transition, [P, P]."""
    moved = jnp.matmul(earlier, later[..., H:, :], precision=jax.lax.Precision.HIGHEST)
    return moved.at[..., :H, :].add(later[..., :H, :])
