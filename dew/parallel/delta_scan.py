"""The convolution and delta rule of gated delta nets on a mesh: heads over tensor, positions over sequence.

Entry points: `convolve_and_correct` on one device, `sharded_convolve_and_correct` on a mesh. Over N slices go the shift
of the last W - 1 tokens that the convolution reads and ceil(log2(N - 1)) + 1 shifts of (state, transition), of heads *
(H + P) * P float32 numbers a row: the parallel prefix of `dew.parallel.ssm_scan`, with matrices for its decays.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dew.arrays import Array, Bool, Float
from dew.kernels.causal_convolution import causal_convolution
from dew.kernels.delta_rule import delta_rule, unit
from dew.parallel.ssm_scan import ScanSpecs, Streams, shift, shifted_halo


class Gates(NamedTuple):
    """What a token does to the state, for each of the R heads of each of the G keys.

    Attributes:
        log_decay: Log of what it leaves of the state, [B, T, G, R].
        beta: Part of the correction that it makes, [B, T, G, R].
    """

    log_decay: Any
    beta: Any


Corrected = tuple[Float[Array, "B T G RH"], Float[Array, "B G RH P"] | None]


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
    earlier = Streams(None, None, None) if before is None else before
    values, keys, queries = (
        activation(causal_convolution(each, own, tail, starts))
        for each, own, tail in zip(streams, taps, earlier, strict=True)
    )
    B, T, G, _ = values.shape
    return values.reshape(B, T, G * heads, -1), unit(keys), unit(queries) * queries.shape[-1] ** -0.5


def convolve_and_correct(
    streams: Streams,
    gates: Gates,
    taps: Streams,
    *,
    activation: Callable[[Array], Array],
    starts: Bool[Array, "B T"] | None = None,
    before: Streams | None = None,
    state: Float[Array, "B G RH P"] | None = None,
) -> Corrected:
    """Convolve the streams, activate them and run the delta rule, on one device.

    Args:
        streams: Projected values (`x`), the R heads of a key side by side, keys (`b`) and queries (`c`).
        gates: What each token does to the state.
        taps: Taps of the convolution of each stream, [..., W].
        activation: Function of the convolved values.
        starts: Tokens that begin a document.
        before: The W - 1 tokens of each stream before the first; None means zeros.
        state: The state before the first token; None means zero.

    Returns:
        The outputs and the last state, float32.
    """
    B, T, G, heads = gates.beta.shape
    values, keys, queries = convolved_heads(
        streams, taps, activation=activation, heads=heads, starts=starts, before=before
    )
    P = keys.shape[-1]
    log_decay, beta = (each.reshape(B, T, G * heads) for each in gates)
    initial = None if state is None else state.reshape(B, G * heads, -1, P)
    y, last = delta_rule(values, keys, queries, log_decay, beta, starts=starts, initial_state=initial)
    return y.reshape(B, T, G, -1), last.reshape(B, G, -1, P)


def sharded_convolve_and_correct(
    mesh: Any,
    streams: Streams,
    gates: Gates,
    taps: Streams,
    *,
    activation: Callable[[Array], Array],
    starts: Bool[Array, "B T"] | None = None,
    before: Streams | None = None,
    state: Float[Array, "B G RH P"] | None = None,
) -> Corrected:
    """Convolve and run the delta rule on a mesh; further arguments as `convolve_and_correct`'s.

    Keys split over tensor where they divide, each with its heads. Positions split over sequence unless there is
    something before them.

    Args:
        mesh: The mesh in context; None or an empty one means one device.

    Returns:
        The outputs and the last state, float32; no state where positions are split.

    Raises:
        LayoutRefused: If the sequence axis does not divide the length, or leaves slices that are shorter than the
            reach of the convolution.
    """
    one_device = functools.partial(convolve_and_correct, activation=activation)
    if mesh is None or mesh.empty or mesh.size == 1 or set(mesh.manual_axes) >= set(mesh.axis_names):
        return one_device(streams, gates, taps, starts=starts, before=before, state=state)
    specs = ScanSpecs(mesh, streams, taps.x.shape[-1], splits_length=before is None and state is None)
    rows, length, heads = specs.tokens
    tokens, weights = PartitionSpec(rows, length, heads, None), PartitionSpec(heads, None, None)
    run = jax.shard_map(
        functools.partial(_correct_slice, specs.slices, activation),
        in_specs=(
            Streams(tokens, tokens, tokens),
            Gates(tokens, tokens),
            Streams(weights, weights, weights),
            None if starts is None else PartitionSpec(rows, length),
            None if before is None else Streams(tokens, tokens, tokens),
            None if state is None else specs.state,
        ),
        out_specs=(tokens, specs.state if specs.slices == 1 else None),
        axis_names=specs.free_axes,
        check_vma=False,
    )
    return run(streams, gates, taps, starts, before, state)


def _correct_slice(slices, activation, streams, gates, taps, starts, before, state):
    """Compute one device's keys and heads of its slice."""
    if slices == 1:
        return convolve_and_correct(
            streams, gates, taps, activation=activation, starts=starts, before=before, state=state
        )
    B, T, G, heads = gates.beta.shape
    before = shifted_halo(streams, starts, taps.x.shape[-1] - 1, slices)
    values, keys, queries = convolved_heads(
        streams, taps, activation=activation, heads=heads, starts=starts, before=before
    )
    log_decay, beta = (each.reshape(B, T, G * heads) for each in gates)
    # The rule is linear in state and values. P further rows, which begin as the identity and write nothing, become what
    # the slice makes of a state, and their outputs what each token would read of it: it is known later.
    H, P = values.shape[-1], keys.shape[-1]
    wide = jnp.pad(values.astype(jnp.float32), [(0, 0)] * 3 + [(0, P)])
    start = jnp.broadcast_to(jnp.pad(jnp.eye(P), ((H, 0), (0, 0))), (B, G * heads, H + P, P))
    y, last = delta_rule(wide, keys, queries, log_decay, beta, starts=starts, initial_state=start)
    incoming = state_before(last, H, slices)
    y = y[..., :H] + jnp.einsum("BNHP,BTNP->BTNH", incoming, y[..., H:])
    return y.reshape(B, T, G, -1), None


def state_before(slice_end: Float[Array, "B N HP P"], H: int, slices: int) -> Float[Array, "B N H P"]:
    """Give the state that all earlier slices leave, inside a shard_map that holds the sequence axis.

    Slices compose as (s1, m1), (s2, m2) -> (s1 m2 + s2, m1 m2). What comes in before slice 0 is zero, both of it.

    Args:
        slice_end: The state that the slice leaves when it begins with zero, [H, P], above its transition, [P, P].
        H: Rows of a state.
        slices: Size of the sequence axis.
    """
    exact = jax.lax.Precision.HIGHEST
    before, distance = shift(slice_end, 1, slices), 1
    while distance < slices - 1:
        moved = jnp.matmul(shift(before, distance, slices), before[..., H:, :], precision=exact)
        before = moved.at[..., :H, :].add(before[..., :H, :])
        distance *= 2
    return before[..., :H, :]
