"""The gated delta net mixer of a decoder block: projections, a short convolution, the delta rule and a gated norm.

Entry points: `GatedDeltaNetSpec`, `GatedDeltaNet` (https://arxiv.org/abs/2412.06464). What checkpoints store as one or
two projections are leaves of their own here, with keys as a dimension and the heads of a key side by side, so that a
mesh splits whole keys.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dew.arrays import Array, Float
from dew.kernels.delta_rule import delta_rule_step
from dew.nn.cache import ScanShape
from dew.nn.linear import Linear
from dew.nn.mlp import ACTIVATIONS
from dew.nn.norm import Norm, NormSpec
from dew.nn.scan_mixer import HEAD_NAMES, ScanMixer, ScanSpec, Taps, initial_steps
from dew.nn.sharding import constrain, declare
from dew.parallel.delta_scan import Gates, convolve_and_correct, convolved_heads
from dew.parallel.scan_slices import Streams

INITIAL_RATES = (1.0, 16.0)
"""Range of the rates of decay that the initial `A_log` gives, uniformly."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNetSpec(ScanSpec):
    """Shape of the mixer, beside what `ScanSpec` has; its heads are those of values, a multiple of the keys.

    Attributes:
        num_keys: Heads of keys and of queries; each serves `num_heads // num_keys` value heads.
        key_dim: Width of a key and of a query.
    """

    num_keys: int
    key_dim: int
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (self.num_heads, self.head_dim, self.num_keys, self.key_dim, self.conv_kernel)
        if min(sizes) < 1 or self.num_heads % self.num_keys:
            raise ValueError(
                "a gated delta net needs positive sizes and num_heads a multiple of num_keys. Received: "
                f"num_heads={self.num_heads}, head_dim={self.head_dim}, num_keys={self.num_keys}, "
                f"key_dim={self.key_dim}, conv_kernel={self.conv_kernel}"
            )

    @property
    def heads_of_key(self) -> int:
        """Value heads R that share a key."""
        return self.num_heads // self.num_keys

    @property
    def transition_size(self) -> int:
        """Numbers that say what a slice of a row makes of the state of a key: a matrix for each of its heads."""
        return self.heads_of_key * self.key_dim**2

    @property
    def cache_shape(self) -> ScanShape:
        """What a cache keeps for the layer: a state per key, the rows of its heads one below the other."""
        return ScanShape(
            num_heads=self.num_keys,
            head_dim=self.heads_of_key * self.head_dim,
            num_groups=self.num_keys,
            state_size=self.key_dim,
            reach=self.conv_kernel - 1,
        )


class GatedDeltaNet(ScanMixer):
    """Mix tokens by a convolution and the gated delta rule, normalised and gated; fields as `ScanMixer`'s."""

    spec: GatedDeltaNetSpec

    def setup(self) -> None:
        """Declare the projections, the taps, what drives the state and the norm of the heads."""
        spec, dtype = self.spec, self.param_dtype
        G, R = spec.num_keys, spec.heads_of_key
        narrow, keys, values = (self.features,), (G, spec.key_dim), (G, R * spec.head_dim)
        names = ("ssm_heads", "head_dim")
        self.q_proj = Linear(narrow, keys, ("embed",), names, False, dtype)
        self.k_proj = Linear(narrow, keys, ("embed",), names, False, dtype)
        self.v_proj = Linear(narrow, values, ("embed",), names, False, dtype)
        self.gate_proj = Linear(narrow, values, ("embed",), names, False, dtype)
        self.beta_proj = Linear(narrow, (G, R), ("embed",), (names[0], None), False, dtype)
        self.decay_proj = Linear(narrow, (G, R), ("embed",), (names[0], None), False, dtype)
        self.out_proj = Linear(values, narrow, names, ("embed",), False, dtype)
        self.q_conv = Taps(keys, names, spec.conv_kernel, False, dtype)
        self.k_conv = Taps(keys, names, spec.conv_kernel, False, dtype)
        self.v_conv = Taps(values, names, spec.conv_kernel, False, dtype)
        self.A_log = declare(self, "A_log", (G, R), (names[0], None), _initial_rates, dtype)
        self.dt_bias = declare(self, "dt_bias", (G, R), (names[0], None), initial_steps, dtype)
        self.norm = Norm(spec.head_dim, NormSpec(eps=spec.norm_eps), dtype)

    def project(self, x: Float[Array, "B T D"]) -> tuple[Array, Streams, Gates]:
        """Project to the gate, the streams and what each token does to the state."""
        projections = (self.gate_proj, self.v_proj, self.k_proj, self.q_proj)
        gate, *streams = (constrain(project(x), HEAD_NAMES) for project in projections)
        rates, steps = (each.astype(jnp.float32) for each in (self.A_log, self.dt_bias))
        log_decay = -jnp.exp(rates) * jax.nn.softplus(self.decay_proj(x).astype(jnp.float32) + steps)
        beta = jax.nn.sigmoid(self.beta_proj(x).astype(jnp.float32))
        return gate, Streams(*streams), Gates(constrain(log_decay, HEAD_NAMES), constrain(beta, HEAD_NAMES))

    def scan(self, streams: Streams, gates: Gates, **documents: Any) -> tuple[Array, Array | None]:
        """Correct the state by several tokens."""
        return convolve_and_correct(self.scan_mesh, streams, gates, **self._convolution(), **documents)

    def step(self, streams: Streams, gates: Gates, *, before: Streams, state: Array) -> tuple[Array, Array]:
        """Correct the state by one token."""
        B, _, G, R = gates.beta.shape
        v, k, q = convolved_heads(streams, heads=R, before=before, **self._convolution())
        log_decay, beta = (each.reshape(B, G * R) for each in gates)
        y, last = delta_rule_step(
            state.reshape(B, G * R, -1, state.shape[-1]), v[:, 0], k[:, 0], q[:, 0], log_decay, beta
        )
        return y.reshape(B, 1, G, -1), last.reshape(state.shape)

    def finish(self, y: Float[Array, "B T G RH"], gate: Float[Array, "B T G RH"]) -> Array:
        """Normalise each head, gate and project."""
        heads = y.astype(gate.dtype).reshape(*y.shape[:3], self.spec.heads_of_key, self.spec.head_dim)
        gated = self.norm(heads).reshape(y.shape) * jax.nn.silu(gate.astype(jnp.float32))
        return self.out_proj(constrain(gated.astype(gate.dtype), HEAD_NAMES))

    def _convolution(self) -> dict[str, Any]:
        """Give taps and activation, arguments of the mixing functions."""
        taps = Streams(self.v_conv.taps, self.k_conv.taps, self.q_conv.taps)
        return {"taps": taps, "activation": ACTIVATIONS[self.spec.activation]}


def _initial_rates(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw rates of decay uniformly."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, *INITIAL_RATES)).astype(dtype)
