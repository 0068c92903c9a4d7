"""What mixers around a scan share: a short convolution before it, what a cache keeps of both, part of their specs.

Entry points: `ScanSpec`, `ScanMixer`, `Taps`. A mixer declares its weights and says what drives its state, how several
tokens and how one are scanned, and what is made of the outputs.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from dew.arrays import Array, Bool, Float
from dew.nn.cache import LayerState, ScanBank
from dew.nn.mlp import Activation, check_activation
from dew.nn.sharding import declare
from dew.parallel.scan_slices import GROUPS, HEADS, LENGTH, ROWS, Streams, length_refusal

HEAD_NAMES = (ROWS, LENGTH, HEADS, None)
GROUP_NAMES = (ROWS, LENGTH, GROUPS, None)
INITIAL_STEPS = (1e-3, 1e-1)
"""Range of the step sizes that the initial `dt_bias` gives, log-uniformly."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanSpec:
    """What the shapes of such mixers share.

    Attributes:
        num_heads: Heads of the scan.
        head_dim: Width of a head.
        conv_kernel: Tokens that the convolution reads, its own included.
        activation: Function of the convolved values; the gate's is always silu.
        norm_eps: Epsilon of the gated norm.
    """

    num_heads: int
    head_dim: int
    conv_kernel: int = 4
    activation: Activation = "silu"
    norm_eps: float = 1e-5
    rotary: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_activation(self.activation)
        if not self.norm_eps > 0:
            raise ValueError(f"a norm needs a positive eps. Received: norm_eps={self.norm_eps}")

    def row_length_refusal(self, length: int, slices: int) -> str | None:
        """Say why rows of a length cannot be cut into the slices of a sequence axis; None where they can."""
        return length_refusal(length, slices, self.conv_kernel)


class ScanMixer(nn.Module):
    """Mix tokens by convolutions and a scan.

    A subclass declares its weights, and has these methods:
        project(x): The gate, the streams before their convolution, and what drives the state: a pytree of what each
            token has for each head, whose zeros leave the state as it is.
        scan(streams, drive, starts=, before=, state=): Outputs and last state of tokens, on the mesh of `scan_mesh`.
        step(streams, drive, before=, state=): The same of one token, which goes on from a state.
        finish(y, gate): The mixture, of the outputs.

    Attributes:
        features: Width of the residual stream.
        spec: Shape of the mixer.
        param_dtype: Storage dtype of the weights.
    """

    features: int
    spec: Any
    param_dtype: Any = "float32"

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
        gate, streams, drive = self.project(x)
        if cache is None:
            y, _ = self.scan(streams, drive, starts=starts)
        else:
            y, cache = self._continued(streams, drive, real, cache)
        return self.finish(y, gate), cache

    def _continued(
        self, streams: Streams, drive: Any, real: Array | None, cache: LayerState
    ) -> tuple[Array, LayerState]:
        """Go on from a cache; padding leaves it as it is."""
        kept = cache.read()
        if real is not None:
            drive = jax.tree.map(lambda each: jnp.where(_beside(real, each), each, 0.0), drive)
        seen = Streams(*(_joined(*pair, real) for pair in zip((kept.x, kept.b, kept.c), streams, strict=True)))
        reach, length = self.spec.conv_kernel - 1, streams.x.shape[1]
        before, own = Streams(*(each[:, :reach] for each in seen)), Streams(*(each[:, reach:] for each in seen))
        mix = self.step if length == 1 else self.scan
        y, state = mix(own, drive, before=before, state=kept.state)
        assert state is not None, "a scan that goes on from a state is not cut"
        tails = Streams(*(each[:, length:] for each in seen))
        return y, cache.written(ScanBank(x=tails.x, b=tails.b, c=tails.c, state=state))

    @property
    def scan_mesh(self) -> Any:
        """The mesh in context; none for initial values, drawn from a row of one token that no sequence axis divides."""
        return None if self.is_initializing() else jax.sharding.get_abstract_mesh()


class Taps(nn.Module):
    """Weights of a convolution that mixes no channels.

    Attributes:
        channels: Sizes of the dimensions of channels.
        names: Their logical names.
        count: Taps.
        use_bias: Whether there is a bias.
        param_dtype: Storage dtype.
    """

    channels: tuple[int, ...]
    names: tuple[str, ...]
    count: int
    use_bias: bool
    param_dtype: Any = "float32"

    def setup(self) -> None:
        """Declare taps and bias."""
        bound = self.count**-0.5
        shape, dtype = (*self.channels, self.count), self.param_dtype
        self.taps = declare(self, "kernel", shape, (*self.names, None), _uniform(bound), dtype)
        zeros = nn.initializers.zeros
        self.bias = declare(self, "bias", self.channels, self.names, zeros, dtype) if self.use_bias else None


def _joined(before: Array, new: Array, real: Array | None) -> Array:
    """Put the tokens that a cache kept right before the first real one.

    Args:
        before: What was kept of the W - 1 tokens before, [B, W - 1, ...].
        new: New tokens, [B, T, ...].
        real: Which of them are no padding, which is on the left; None means all.

    Returns:
        [B, W - 1 + T, ...], whose last W - 1 tokens are kept next.
    """
    if real is None:
        return jnp.concatenate([before, new], axis=1)
    padded = jnp.concatenate([jnp.zeros_like(before), jnp.where(_beside(real, new), new, 0)], axis=1)
    first = jnp.where(real.any(axis=1), jnp.argmax(real, axis=1), real.shape[1])
    return jax.vmap(lambda row, kept, at: jax.lax.dynamic_update_slice_in_dim(row, kept, at, 0))(padded, before, first)


def _beside(real: Bool[Array, "B T"], array: Array) -> Array:
    """Lay out what tokens have beside [B, T, ...]."""
    return real.reshape(*real.shape, *(1,) * (array.ndim - 2))


def _uniform(bound: float) -> Any:
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def initial_steps(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw step sizes log-uniformly, and undo the softplus."""
    low, high = (math.log(bound) for bound in INITIAL_STEPS)
    steps = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
    return (steps + jnp.log(-jnp.expm1(-steps))).astype(dtype)
