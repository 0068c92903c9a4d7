"""Rotary position embedding and the ways checkpoints stretch it over longer contexts.

Entry points: `RotarySpec`, `rotary_tables`, `rotate` (https://arxiv.org/abs/2104.09864). Frequencies are data of
the checkpoint, computed in float32 as the reference does.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from dew.arrays import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Divide every frequency by a factor (position interpolation, https://arxiv.org/abs/2306.15595)."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """Raise theta with the length of a row once it passes the original context (dynamic NTK).

    A row's length is its largest position + 1, so a row in a batch is the row alone. Keys that a cache already holds
    keep the rotation they were written with, as in the reference.
    """

    factor: float
    original_max_length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Divide long wavelengths by a factor, keep short ones, blend between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Interpolate by wavelength and sharpen attention (https://arxiv.org/abs/2309.00071).

    Attributes:
        factor: Ratio of the new to the original context.
        original_max_length: Context of the original training, in tokens.
        beta_fast: Rotations over the original context above which a frequency is kept.
        beta_slow: Rotations below which it is divided by the factor.
        attention_factor: Factor on cos and sin; None means 0.1 ln(factor) + 1, or the ratio of the two mscales.
        mscale: Numerator's coefficient in that formula.
        mscale_all_dim: Denominator's coefficient.
        truncate: Whether the bounds of the blend are rounded to whole dimensions.
    """

    factor: float
    original_max_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """Divide each frequency by a factor of its own, of one list or another by a row's length (LongRoPE).

    Source: https://arxiv.org/abs/2402.13753. A row's length is its largest position + 1; keys that a cache already
    holds keep the rotation they were written with.

    Attributes:
        short_factor: Divisors up to the original context, one per frequency.
        long_factor: Divisors beyond it.
        original_max_length: Context of the original training, in tokens.
        attention_factor: Factor on cos and sin.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_length: int
    attention_factor: float = 1.0


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """How positions rotate queries and keys.

    Attributes:
        theta: Base of the wavelengths.
        scaling: How the frequencies are stretched; None leaves them.
        fraction: Leading part of the head width that is rotated.
        interleaved: Whether neighbouring dimensions are rotated together, rather than the two halves.
        in_float32: Whether the rotation is computed in float32 whatever the heads are (Cohere, OLMo 2).
        round_tables: Whether cos and sin are rounded to the heads' dtype before that (all but OLMo 2).
    """

    theta: float
    scaling: Scaling | None = None
    fraction: float = 1.0
    interleaved: bool = False
    in_float32: bool = False
    round_tables: bool = True

    def __post_init__(self) -> None:
        if not self.theta > 1:
            raise ValueError(f"rotary theta must exceed 1. Received: theta={self.theta}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"rotary fraction must be in (0, 1]. Received: fraction={self.fraction}")
        if not (self.round_tables or self.in_float32):
            raise ValueError("tables that are not rounded need a rotation in float32. Received: in_float32=False")
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            raise ValueError(f"rotary scaling must be one of {Scaling.__args__}. Received: scaling={self.scaling!r}")

    def width(self, head_dim: int) -> int:
        """Count the rotated dimensions of a head.

        Raises:
            ValueError: If it is odd, or a scaling has factors for another width.
        """
        width = int(head_dim * self.fraction)
        if width % 2 or not width:
            raise ValueError(f"rotary needs an even width. Received: head_dim={head_dim}, fraction={self.fraction}")
        if isinstance(self.scaling, LongRopeScaling):
            counts = len(self.scaling.short_factor), len(self.scaling.long_factor)
            if counts != (width // 2, width // 2):
                raise ValueError(
                    f"longrope needs {width // 2} short and long factors for {width} rotated dimensions. Received: "
                    f"{counts[0]} and {counts[1]}"
                )
        return width


Tables = tuple[Float[Array, "#B T half"], Float[Array, "#B T half"]]


def rotary_tables(spec: RotarySpec, head_dim: int, positions: Int[Array, "B T"]) -> Tables:
    """Compute cos and sin of every position's angles, in float32.

    Args:
        spec: Base and scaling.
        head_dim: Head width.
        positions: Token positions, [B or 1, T], counted from 0 inside each document.

    Returns:
        Two tables [B or 1, T, rotated width / 2].
    """
    width = spec.width(head_dim)
    frequencies, factor = _frequencies(spec, width, positions)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: Float[Array, "B T N H"], tables: Tables, spec: RotarySpec) -> Float[Array, "B T N H"]:
    """Rotate pairs of each head's leading dimensions by the position's angles.

    Args:
        x: Queries or keys.
        tables: Output of `rotary_tables`.
        spec: Which dimensions make a pair, and the dtype of the arithmetic.

    Returns:
        The rotated heads, in the dtype of `x`.
    """
    dtype = x.dtype if spec.round_tables else jnp.float32
    cos, sin = (table[:, :, None, :].astype(dtype) for table in tables)
    width = 2 * cos.shape[-1]
    heads = x.astype(jnp.float32) if spec.in_float32 else x
    turned, rest = heads[..., :width], heads[..., width:]
    if spec.interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
        pairs = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return jnp.concatenate([pairs.reshape(turned.shape), rest], axis=-1).astype(x.dtype)
    first, second = turned[..., : width // 2], turned[..., width // 2 :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


def _frequencies(spec: RotarySpec, width: int, positions: Int[Array, "B T"]) -> tuple[Array | np.ndarray, float]:
    """Give the inverse wavelengths, [width / 2] or [B, 1, width / 2], and the factor on cos and sin."""
    scaling = spec.scaling
    if isinstance(scaling, DynamicScaling):
        return _dynamic(spec.theta, scaling, width, positions), 1.0
    if isinstance(scaling, LongRopeScaling):
        return _longrope(spec.theta, scaling, width, positions), scaling.attention_factor
    plain = _plain(spec.theta, width)
    if isinstance(scaling, LinearScaling):
        return plain / np.float32(scaling.factor), 1.0
    if isinstance(scaling, Llama3Scaling):
        return _llama3(plain, scaling), 1.0
    if isinstance(scaling, YarnScaling):
        return _yarn(spec.theta, plain, scaling, width), _yarn_factor(scaling)
    return plain, 1.0


def _plain(theta: float, width: int) -> np.ndarray:
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return np.float32(1.0) / (np.float32(theta) ** exponents)


def _dynamic(theta: float, scaling: DynamicScaling, width: int, positions: Int[Array, "B T"]) -> Array:
    original = float(scaling.original_max_length)
    length = jnp.maximum(jnp.max(positions, axis=1, keepdims=True)[..., None] + 1, original).astype(jnp.float32)
    stretch = scaling.factor * length / original - (scaling.factor - 1.0)
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    return 1.0 / (theta * stretch ** (width / (width - 2))) ** exponents


def _longrope(theta: float, scaling: LongRopeScaling, width: int, positions: Int[Array, "B T"]) -> Array:
    powers = np.float32(theta) ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    factors = np.asarray([scaling.short_factor, scaling.long_factor], np.float32)
    short, long = np.float32(1.0) / (factors * powers)
    length = jnp.max(positions, axis=1, keepdims=True)[..., None] + 1
    return jnp.where(length > scaling.original_max_length, long, short)


def _llama3(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    wavelengths = 2 * math.pi / plain
    longest = scaling.original_max_length / scaling.low_freq_factor
    shortest = scaling.original_max_length / scaling.high_freq_factor
    blend = (scaling.original_max_length / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * plain / scaling.factor + blend * plain
    kept = np.where(wavelengths > longest, plain / scaling.factor, blended)
    return np.where(wavelengths < shortest, plain, kept).astype(np.float32)


def _yarn(theta: float, plain: np.ndarray, scaling: YarnScaling, width: int) -> np.ndarray:
    def dimension(rotations: float) -> float:
        return width * math.log(scaling.original_max_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = (np.arange(width // 2, dtype=np.float32) - low) / (max(high - low, 0.001) if low == high else high - low)
    interpolated = np.clip(ramp, 0, 1)
    return (plain / scaling.factor * interpolated + plain * (1 - interpolated)).astype(np.float32)


def _yarn_factor(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_sharpening(scaling, scaling.mscale) / yarn_sharpening(scaling, scaling.mscale_all_dim)
    return yarn_sharpening(scaling, 1.0)


def yarn_sharpening(scaling: YarnScaling, coefficient: float) -> float:
    """Compute 0.1 c ln(factor) + 1, what a longer context multiplies queries and keys by (section 3.4 of the paper).

    Args:
        scaling: The scaling.
        coefficient: The coefficient c.
    """
    return 1.0 if scaling.factor <= 1 else 0.1 * coefficient * math.log(scaling.factor) + 1.0
