"""The gated delta net mixer of a decoder block: projections, a short convolution, the delta rule and a gated norm.

Entry points: `GatedDeltaNetSpec`, `GatedDeltaNet` (https://arxiv.org/abs/2412.06464). What checkpoints store as one or
two projections are leaves of their own here, with keys as a dimension and the heads of a key side by side, so that a
mesh splits whole keys.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dew.arrays import Array, Bool, Float
from dew.kernels.delta_rule import delta_rule_step
from dew.nn.cache import LayerState, ScanBank, ScanShape
from dew.nn.linear import Linear
from dew.nn.mamba2 import initial_steps
from dew.nn.mlp import ACTIVATIONS, Activation
from dew.nn.norm import Norm, NormSpec
from dew.nn.sharding import constrain, declare
from dew.nn.short_convolution import Taps, joined
from dew.parallel.delta_scan import Gates, convolved_heads, sharded_convolve_and_correct
from dew.parallel.ssm_scan import Streams, length_refusal

NAMES = ("activation_batch", "activation_length", "activation_ssm_heads", None)
INITIAL_RATES = (1.0, 16.0)
"""Range of the rates of decay that the initial `A_log` gives, uniformly."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNetSpec:
    """Shape of the mixer.

    Attributes:
        num_heads: Value heads, a multiple of `num_keys`.
        head_dim: Width of a value head.
        num_keys: Heads of keys and of queries; each serves `num_heads // num_keys` value heads.
        key_dim: Width of a key and of a query.
        conv_kernel: Tokens that the convolution reads, its own included.
        activation: Function of the convolved values; the gate's is always silu.
        norm_eps: Epsilon of the gated norm.
    """

    num_heads: int
    head_dim: int
    num_keys: int
    key_dim: int
    conv_kernel: int = 4
    activation: Activation = "silu"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        sizes = (self.num_heads, self.head_dim, self.num_keys, self.key_dim, self.conv_kernel)
        if min(sizes) < 1 or self.num_heads % self.num_keys:
            raise ValueError(
                "a gated delta net needs positive sizes and num_heads a multiple of num_keys. Received: "
                f"num_heads={self.num_heads}, head_dim={self.head_dim}, num_keys={self.num_keys}, "
                f"key_dim={self.key_dim}, conv_kernel={self.conv_kernel}"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {sorted(ACTIVATIONS)}. Received: activation={self.activation!r}"
            )
        if not self.norm_eps > 0:
            raise ValueError(f"a norm needs a positive eps. Received: norm_eps={self.norm_eps}")

    @property
    def heads_of_key(self) -> int:
        """Value heads R that share a key."""
        return self.num_heads // self.num_keys

    @property
    def rotary(self) -> None:
        """Rotary positions: none."""
        return None

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

    def row_length_refusal(self, length: int, slices: int) -> str | None:
        """Say why the layer cannot cut rows of a length into `slices` over the sequence axis; None where it can."""
        return length_refusal(length, slices, self.conv_kernel)


class GatedDeltaNet(nn.Module):
    """Mix tokens by a convolution and the gated delta rule, normalised and gated.

    Attributes:
        features: Width of the residual stream.
        spec: Heads, keys, convolution.
        param_dtype: Storage dtype of the weights.
    """

    features: int
    spec: GatedDeltaNetSpec
    param_dtype: Any = "float32"

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
        gate = constrain(self.gate_proj(x), NAMES)
        streams = Streams(*(constrain(project(x), NAMES) for project in (self.v_proj, self.k_proj, self.q_proj)))
        rates, steps = (each.astype(jnp.float32) for each in (self.A_log, self.dt_bias))
        log_decay = -jnp.exp(rates) * jax.nn.softplus(self.decay_proj(x).astype(jnp.float32) + steps)
        beta = jax.nn.sigmoid(self.beta_proj(x).astype(jnp.float32))
        gates = Gates(constrain(log_decay, NAMES), constrain(beta, NAMES))
        if cache is None:
            # Initial values are drawn from a row of one token, which no sequence axis divides.
            mesh = None if self.is_initializing() else jax.sharding.get_abstract_mesh()
            y, _ = sharded_convolve_and_correct(mesh, streams, gates, starts=starts, **self._convolution())
        else:
            y, cache = self._continued(streams, gates, real, cache)
        return self.out_proj(constrain(self._gated(y, gate, x.dtype), NAMES)), cache

    def _continued(
        self, streams: Streams, gates: Gates, real: Array | None, cache: LayerState
    ) -> tuple[Array, LayerState]:
        """Go on from a cache; padding leaves it as it is."""
        kept = cache.read()
        if real is not None:
            gates = Gates(*(jnp.where(real[..., None, None], each, 0.0) for each in gates))
        seen = Streams(*(joined(*pair, real) for pair in zip((kept.x, kept.b, kept.c), streams, strict=True)))
        reach, length = self.spec.conv_kernel - 1, gates.beta.shape[1]
        before, own = Streams(*(each[:, :reach] for each in seen)), Streams(*(each[:, reach:] for each in seen))
        if length == 1:
            y, state = self._step(own, gates, before, kept.state)
        else:
            mesh = jax.sharding.get_abstract_mesh()
            y, last = sharded_convolve_and_correct(
                mesh, own, gates, before=before, state=kept.state, **self._convolution()
            )
            assert last is not None, "what goes on from a state ends in one"
            state = last
        tails = Streams(*(each[:, length:] for each in seen))
        return y, cache.written(ScanBank(x=tails.x, b=tails.b, c=tails.c, state=state))

    def _step(self, own: Streams, gates: Gates, before: Streams, state: Array) -> tuple[Array, Array]:
        """Read one token."""
        B, _, G, R = gates.beta.shape
        v, k, q = convolved_heads(own, heads=R, before=before, **self._convolution())
        log_decay, beta = (each.reshape(B, G * R) for each in gates)
        y, last = delta_rule_step(
            state.reshape(B, G * R, -1, state.shape[-1]), v[:, 0], k[:, 0], q[:, 0], log_decay, beta
        )
        return y.reshape(B, 1, G, -1), last.reshape(state.shape)

    def _convolution(self) -> dict[str, Any]:
        """Give taps and activation, arguments of the mixing functions."""
        taps = Streams(self.v_conv.taps, self.k_conv.taps, self.q_conv.taps)
        return {"taps": taps, "activation": ACTIVATIONS[self.spec.activation]}

    def _gated(self, y: Float[Array, "B T G RH"], gate: Float[Array, "B T G RH"], dtype: Any) -> Array:
        """Normalise each head and multiply by the gate."""
        heads = self.norm(y.astype(dtype).reshape(*y.shape[:3], self.spec.heads_of_key, self.spec.head_dim))
        return (heads.reshape(y.shape) * jax.nn.silu(gate.astype(jnp.float32))).astype(dtype)


def _initial_rates(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw rates of decay uniformly."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, *INITIAL_RATES)).astype(dtype)
