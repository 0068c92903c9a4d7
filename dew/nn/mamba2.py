"""The Mamba-2 mixer of a decoder block: projections, a short convolution, a state-space scan and a gated norm.

Entry points: `Mamba2Spec`, `Mamba2` (https://arxiv.org/abs/2405.21060, section 7). What checkpoints store as one
projection and one convolution are leaves of their own here, with heads and groups as dimensions, so that a mesh splits
whole heads.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dew.arrays import Array, Bool, Float
from dew.kernels.ssd import ssd_step, time_steps
from dew.nn.cache import LayerState, ScanBank, ScanShape
from dew.nn.linear import Linear
from dew.nn.mlp import ACTIVATIONS, Activation
from dew.nn.sharding import constrain, declare
from dew.nn.short_convolution import Taps, joined
from dew.parallel.ssm_scan import ScanWeights, Streams, convolved, length_refusal, sharded_convolve_and_scan

HEAD_NAMES = ("activation_batch", "activation_length", "activation_ssm_heads", None)
GROUP_NAMES = ("activation_batch", "activation_length", "activation_ssm_groups", None)
WIDE_WEIGHTS = frozenset({"A_log", "D", "dt_bias"})
"""Weights that are used in the dtype they are stored in: a decay is an exponential of an exponential."""
INITIAL_STEPS = (1e-3, 1e-1)
"""Range of the step sizes that the initial `dt_bias` gives, log-uniformly."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Spec:
    """Shape of the mixer.

    Attributes:
        num_heads: Heads of the scan.
        head_dim: Width of a head.
        num_groups: Groups of heads that share what is written to the state and read from it.
        state_size: Width of the state.
        conv_kernel: Tokens that the convolution reads, its own included.
        conv_bias: Whether the convolution adds a bias.
        bias: Whether the projections add a bias.
        activation: Function of the convolved values; the gate's is always silu.
        norm_eps: Epsilon of the gated norm.
        norm_groups: How many groups of heads are normalised apart; 1 means all together.
        step_limits: Smallest and largest step size.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_kernel: int = 4
    conv_bias: bool = True
    bias: bool = False
    activation: Activation = "silu"
    norm_eps: float = 1e-5
    norm_groups: int = 1
    step_limits: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        sizes = (self.num_heads, self.head_dim, self.num_groups, self.state_size, self.conv_kernel, self.norm_groups)
        if min(sizes) < 1 or self.num_heads % self.num_groups or self.num_heads % self.norm_groups:
            raise ValueError(
                "Mamba-2 needs positive sizes and num_heads a multiple of num_groups and of norm_groups. Received: "
                f"num_heads={self.num_heads}, head_dim={self.head_dim}, num_groups={self.num_groups}, "
                f"state_size={self.state_size}, conv_kernel={self.conv_kernel}, norm_groups={self.norm_groups}"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {sorted(ACTIVATIONS)}. Received: activation={self.activation!r}"
            )
        if not self.norm_eps > 0:
            raise ValueError(f"a norm needs a positive eps. Received: norm_eps={self.norm_eps}")
        low, high = self.step_limits
        if not 0 <= low < high:
            raise ValueError(f"step_limits must be 0 <= low < high. Received: step_limits={self.step_limits}")

    @property
    def rotary(self) -> None:
        """Rotary positions: none."""
        return None

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

    def row_length_refusal(self, length: int, slices: int) -> str | None:
        """Say why rows of a length cannot be cut into the slices of a sequence axis; None where they can."""
        return length_refusal(length, slices, self.conv_kernel)


class Mamba2(nn.Module):
    """Mix tokens by a convolution and a scan, gated and normalised.

    Attributes:
        features: Width of the residual stream.
        spec: Heads, groups, state, convolution.
        param_dtype: Storage dtype of the weights.
    """

    features: int
    spec: Mamba2Spec
    param_dtype: Any = "float32"

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

    def __call__(
        self,
        x: Float[Array, "B T D"],
        starts: Bool[Array, "B T"] | None = None,
        real: Bool[Array, "B T"] | None = None,
        cache: LayerState | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerState | None]:
        """Mix the tokens of `x`, and what the cache keeps of those before them.

        Args:
            x: Normalised residual stream.
            starts: Tokens that begin a document; None means one document. Unused with a cache.
            real: With a cache, tokens that are not padding, which is on the left; None means all.
            cache: This layer's window on the cache; None for whole sequences.

        Returns:
            The projected mixture, and the window after the tokens.
        """
        gate = constrain(self.gate_proj(x), HEAD_NAMES)
        streams = Streams(
            constrain(self.x_proj(x), HEAD_NAMES),
            constrain(self.b_proj(x), GROUP_NAMES),
            constrain(self.c_proj(x), GROUP_NAMES),
        )
        low, high = self.spec.step_limits
        dt = constrain(time_steps(self.dt_proj(x), self.dt_bias, low=low, high=high), HEAD_NAMES[:3])
        if cache is None:
            y = self._whole(streams, dt, starts)
        else:
            y, cache = self._continued(streams, dt, real, cache)
        return self.out_proj(constrain(self._gated_norm(y, gate).astype(x.dtype), HEAD_NAMES)), cache

    def _whole(self, streams: Streams, dt: Array, starts: Array | None) -> Array:
        """Scan whole sequences."""
        # Initial values are drawn from a row of one token, which no sequence axis divides.
        mesh = None if self.is_initializing() else jax.sharding.get_abstract_mesh()
        return sharded_convolve_and_scan(
            mesh, streams, dt, self._weights(), activation=ACTIVATIONS[self.spec.activation], starts=starts
        )[0]

    def _continued(
        self, streams: Streams, dt: Array, real: Array | None, cache: LayerState
    ) -> tuple[Array, LayerState]:
        """Scan on from a cache; padding leaves it as it is."""
        kept = cache.read()
        if real is not None:
            dt = jnp.where(real[..., None], dt, 0.0)
        seen = Streams(*(joined(*pair, real) for pair in zip((kept.x, kept.b, kept.c), streams, strict=True)))
        reach = self.spec.conv_kernel - 1
        before, own = Streams(*(each[:, :reach] for each in seen)), Streams(*(each[:, reach:] for each in seen))
        weights, activation = self._weights(), ACTIVATIONS[self.spec.activation]
        if dt.shape[1] == 1:
            x, b, c = (each[:, 0] for each in convolved(own, weights, activation=activation, before=before))
            y, state = ssd_step(kept.state, x, dt[:, 0], weights.decay, b, c, skip=weights.skip)
            y = y[:, None]
        else:
            mesh = jax.sharding.get_abstract_mesh()
            y, last = sharded_convolve_and_scan(
                mesh, own, dt, weights, activation=activation, before=before, state=kept.state
            )
            assert last is not None, "a scan that goes on from a state is not cut"
            state = last
        tails = Streams(*(each[:, dt.shape[1] :] for each in seen))
        return y, cache.written(ScanBank(x=tails.x, b=tails.b, c=tails.c, state=state))

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


def initial_steps(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw step sizes log-uniformly, and undo the softplus."""
    low, high = (math.log(bound) for bound in INITIAL_STEPS)
    steps = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
    return (steps + jnp.log(-jnp.expm1(-steps))).astype(dtype)
