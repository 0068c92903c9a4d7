"""The Mamba-2 mixer of a decoder block: projections, a short convolution, a state-space scan and a gated norm.

Entry points: `Mamba2Spec`, `Mamba2` (https://arxiv.org/abs/2405.21060, section 7). What checkpoints store as one
projection and one convolution are leaves of their own here, with heads and groups as dimensions, so that a mesh splits
whole heads.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from dew.arrays import Array, Float
from dew.kernels.ssd import ssd_step, time_steps
from dew.nn.cache import ScanShape
from dew.nn.linear import Linear
from dew.nn.mlp import ACTIVATIONS
from dew.nn.scan_mixer import GROUP_NAMES, HEAD_NAMES, ScanMixer, ScanSpec, Taps, initial_steps
from dew.nn.sharding import constrain, declare
from dew.parallel.scan_slices import Streams, convolved
from dew.parallel.ssm_scan import ScanWeights, convolve_and_scan

WIDE_WEIGHTS = frozenset({"A_log", "D", "dt_bias"})
"""Weights that are used in the dtype they are stored in: a decay is an exponential of an exponential."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Spec(ScanSpec):
    """Shape of the mixer, beside what `ScanSpec` has.

    Attributes:
        num_groups: Groups of heads that share what is written to the state and read from it.
        state_size: Width of the state.
        conv_bias: Whether the convolution adds a bias.
        bias: Whether the projections add a bias.
        norm_groups: How many groups of heads are normalised apart; 1 means all together.
        step_limits: Smallest and largest step size.
    """

    num_groups: int
    state_size: int
    conv_bias: bool = True
    bias: bool = False
    norm_groups: int = 1
    step_limits: tuple[float, float] = (0.0, math.inf)
    transition_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (self.num_heads, self.head_dim, self.num_groups, self.state_size, self.conv_kernel, self.norm_groups)
        if min(sizes) < 1 or self.num_heads % self.num_groups or self.num_heads % self.norm_groups:
            raise ValueError(
                "Mamba-2 needs positive sizes and num_heads a multiple of num_groups and of norm_groups. Received: "
                f"num_heads={self.num_heads}, head_dim={self.head_dim}, num_groups={self.num_groups}, "
                f"state_size={self.state_size}, conv_kernel={self.conv_kernel}, norm_groups={self.norm_groups}"
            )
        low, high = self.step_limits
        if not 0 <= low < high:
            raise ValueError(f"step_limits must be 0 <= low < high. Received: step_limits={self.step_limits}")

    @property
    def cache_shape(self) -> ScanShape:
        """What a cache keeps for the layer."""
        return ScanShape(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_groups=self.num_groups,
            state_size=self.state_size,
            reach=self.conv_kernel - 1,
        )


class Mamba2(ScanMixer):
    """Mix tokens by a convolution and a scan, gated and normalised; fields as `ScanMixer`'s."""

    spec: Mamba2Spec

    def setup(self) -> None:
        """Declare the projections, the taps and what drives the state."""
        spec, dtype = self.spec, self.param_dtype
        narrow, heads, groups = (self.features,), (spec.num_heads, spec.head_dim), (spec.num_groups, spec.state_size)
        head_names, group_names = ("ssm_heads", "head_dim"), ("ssm_groups", "ssm_state")
        self.gate_proj = Linear(narrow, heads, ("embed",), head_names, spec.bias, dtype)
        self.x_proj = Linear(narrow, heads, ("embed",), head_names, spec.bias, dtype)
        self.b_proj = Linear(narrow, groups, ("embed",), group_names, spec.bias, dtype)
        self.c_proj = Linear(narrow, groups, ("embed",), group_names, spec.bias, dtype)
        self.dt_proj = Linear(narrow, heads[:1], ("embed",), head_names[:1], spec.bias, dtype)
        self.out_proj = Linear(heads, narrow, head_names, ("embed",), spec.bias, dtype)
        self.x_conv = Taps(heads, head_names, spec.conv_kernel, spec.conv_bias, dtype)
        self.b_conv = Taps(groups, group_names, spec.conv_kernel, spec.conv_bias, dtype)
        self.c_conv = Taps(groups, group_names, spec.conv_kernel, spec.conv_bias, dtype)
        self.A_log = declare(self, "A_log", heads[:1], head_names[:1], _initial_rates, dtype)
        self.D = declare(self, "D", heads[:1], head_names[:1], nn.initializers.ones, dtype)
        self.dt_bias = declare(self, "dt_bias", heads[:1], head_names[:1], initial_steps, dtype)
        self.norm_scale = declare(self, "norm_scale", heads, head_names, nn.initializers.ones, dtype)

    def project(self, x: Float[Array, "B T D"]) -> tuple[Array, Streams, Array]:
        """Project to the gate, the streams and step sizes."""
        gate = constrain(self.gate_proj(x), HEAD_NAMES)
        streams = Streams(
            constrain(self.x_proj(x), HEAD_NAMES),
            constrain(self.b_proj(x), GROUP_NAMES),
            constrain(self.c_proj(x), GROUP_NAMES),
        )
        low, high = self.spec.step_limits
        dt = constrain(time_steps(self.dt_proj(x), self.dt_bias, low=low, high=high), HEAD_NAMES[:3])
        return gate, streams, dt

    def scan(self, streams: Streams, dt: Array, **documents: Any) -> tuple[Array, Array | None]:
        """Scan several tokens."""
        activation = ACTIVATIONS[self.spec.activation]
        return convolve_and_scan(self.scan_mesh, streams, dt, self._weights(), activation=activation, **documents)

    def step(self, streams: Streams, dt: Array, *, before: Streams, state: Array) -> tuple[Array, Array]:
        """Scan one token."""
        weights, activation = self._weights(), ACTIVATIONS[self.spec.activation]
        mixed = convolved(streams, weights.taps, weights.biases, activation=activation, before=before)
        x, b, c = (each[:, 0] for each in mixed)
        y, state = ssd_step(state, x, dt[:, 0], weights.decay, b, c, skip=weights.skip)
        return y[:, None], state

    def finish(self, y: Float[Array, "B T N H"], gate: Float[Array, "B T N H"]) -> Array:
        """Gate, normalise and project."""
        return self.out_proj(constrain(self._gated_norm(y, gate).astype(gate.dtype), HEAD_NAMES))

    def _weights(self) -> ScanWeights:
        convolutions = (self.x_conv, self.b_conv, self.c_conv)
        return ScanWeights(
            taps=Streams(*(each.taps for each in convolutions)),
            biases=Streams(*(each.bias for each in convolutions)) if self.spec.conv_bias else None,
            decay=-jnp.exp(self.A_log.astype(jnp.float32)),
            skip=self.D,
        )

    def _gated_norm(self, y: Float[Array, "B T N H"], gate: Float[Array, "B T N H"]) -> Array:
        """Multiply by the gate, then normalise each group of heads and scale."""
        spec = self.spec
        gated = y * jax.nn.silu(gate.astype(jnp.float32))
        squares = jnp.sum(gated * gated, axis=-1)
        if spec.norm_groups == 1:
            total = jnp.sum(squares, axis=-1, keepdims=True)
        else:
            # A product with the groups' members, since a mesh that splits heads may not split groups.
            heads = spec.num_heads // spec.norm_groups
            members = jnp.repeat(jnp.eye(spec.norm_groups), heads, axis=0)
            exact = jax.lax.Precision.HIGHEST
            total = jnp.einsum(
                "BTg,Ng->BTN", jnp.einsum("BTN,Ng->BTg", squares, members, precision=exact), members, precision=exact
            )
        width = spec.num_heads * spec.head_dim // spec.norm_groups
        return gated * jax.lax.rsqrt(total / width + spec.norm_eps)[..., None] * self.norm_scale.astype(jnp.float32)


def _initial_rates(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Give the heads the rates 1, 2, 3, ... (S4D-Real, https://arxiv.org/abs/2206.11893)."""
    del key
    return jnp.log(jnp.arange(1, shape[0] + 1, dtype=jnp.float32)).astype(dtype)
