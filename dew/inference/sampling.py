"""How the next token is drawn from the logits: greedy, temperature, top-k, top-p.

Entry points: `Sampling` (the record the engine reads), the strategies `Greedy`, `Temperature`, `TopK`, `TopP`,
and `draw_tokens`. The order temperature, top-k, top-p is that of transformers; top-p is nucleus sampling
(https://arxiv.org/abs/1904.09751, section 3.1).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class SamplingKind(NamedTuple):
    """What of a `Sampling` shapes the compiled program; the numbers themselves are arguments."""

    is_greedy: bool
    has_top_k: bool
    has_top_p: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution each new token is drawn from.

    Args:
        temperature: The logits are divided by it; 0 takes the largest logit and draws nothing.
        top_k: Keep the `top_k` largest logits (and what ties with the last of them); None keeps all.
        top_p: Then keep the fewest largest tokens whose probability reaches `top_p` (and what ties with the
            last of them); 1.0 keeps all.

    Raises:
        ValueError: If a number leaves no distribution to draw from.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                "temperature must be a finite number of 0 or more (0 is greedy). "
                f"Received: temperature={self.temperature}"
            )
        if self.top_k is not None and (isinstance(self.top_k, bool) or int(self.top_k) != self.top_k or self.top_k < 1):
            raise ValueError(f"top_k must be a whole number of 1 or more, or None. Received: top_k={self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1 (1 keeps all). Received: top_p={self.top_p}")

    @property
    def kind(self) -> SamplingKind:
        """The part that changes the compiled program."""
        if self.temperature == 0:
            return SamplingKind(True, False, False)
        return SamplingKind(False, self.top_k is not None, self.top_p < 1)

    @property
    def numbers(self) -> np.ndarray:
        """The part that is an argument of the program: float32 `[temperature, top_k, top_p]`."""
        # Vocabularies stay far below 2**24, so a float32 holds every useful top_k exactly.
        top_k = min(self.top_k or 2**24, 2**24)
        return np.asarray([self.temperature, top_k, self.top_p], np.float32)


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Take the largest logit; among equals the smallest token id."""

    @property
    def sampling(self) -> Sampling:
        """The record the engine reads."""
        return Sampling(temperature=0.0)


@dataclasses.dataclass(frozen=True)
class Temperature:
    """Draw from the whole distribution of the logits over `temperature`."""

    temperature: float = 1.0

    @property
    def sampling(self) -> Sampling:
        """The record the engine reads."""
        return Sampling(temperature=self.temperature)


@dataclasses.dataclass(frozen=True)
class TopK:
    """Draw from the `k` largest logits over `temperature`."""

    k: int = 5
    temperature: float = 1.0

    @property
    def sampling(self) -> Sampling:
        """The record the engine reads."""
        return Sampling(temperature=self.temperature, top_k=self.k)


@dataclasses.dataclass(frozen=True)
class TopP:
    """Draw from the fewest tokens whose probability reaches `p`, after an optional cut to the `k` largest."""

    p: float = 0.9
    temperature: float = 1.0
    k: int | None = None

    @property
    def sampling(self) -> Sampling:
        """The record the engine reads."""
        return Sampling(temperature=self.temperature, top_k=self.k, top_p=self.p)


Strategy = Sampling | Greedy | Temperature | TopK | TopP


def as_sampling(sampler: Strategy) -> Sampling:
    """Turn a strategy, or a record, into the record the engine reads.

    Raises:
        TypeError: If `sampler` is neither.
    """
    if isinstance(sampler, Sampling):
        return sampler
    record = getattr(sampler, "sampling", None)
    if not isinstance(record, Sampling):
        raise TypeError(
            "sampling must be a dew.inference.Sampling or one of the strategies Greedy(), Temperature(t), TopK(k=...), "
            f"TopP(p=...). Received: sampling={sampler!r}"
        )
    return record


# A field of generation_config.json that changes the draw, and the value that switches it off.
_CONTROLS_OFF: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0, 0.0),
    "min_p": (0, 0.0),
    "typical_p": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "top_h": (),
    "repetition_penalty": (1, 1.0),
    "encoder_repetition_penalty": (1, 1.0),
    "no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "sequence_bias": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "min_new_tokens": (0,),
    "min_length": (0,),
    "guidance_scale": (1, 1.0),
    "diversity_penalty": (0, 0.0),
    "dola_layers": (),
    "watermarking_config": (),
}


def sampling_from_config(generation_config: Mapping[str, Any] | None) -> Sampling:
    """Read the draw that a checkpoint's `generation_config.json` asks for.

    Args:
        generation_config: The file's fields; None or an empty mapping is greedy, as in transformers.

    Returns:
        Greedy unless `do_sample` is true; then its temperature, top_k (50 when absent, transformers' default)
        and top_p.

    Raises:
        ValueError: If the file switches on a control that is not implemented.
    """
    config = dict(generation_config or {})
    for name, off in _CONTROLS_OFF.items():
        value = config.get(name)
        if value is not None and value not in off:
            raise ValueError(
                f"The checkpoint's generation_config.json sets {name}={value!r}, which this version does not apply. "
                "Pass sampling=, for example Greedy() or TopP(p=0.9), to choose the draw yourself."
            )
    if not config.get("do_sample", False):
        return Sampling(temperature=0.0)

    def given(name: str, default: Any) -> Any:
        value = config.get(name)
        return default if value is None else value

    # transformers writes top_k=0 for "keep all".
    return Sampling(temperature=given("temperature", 1.0), top_k=given("top_k", 50) or None, top_p=given("top_p", 1.0))


def _ordered_bits(values: jax.Array) -> jax.Array:
    """Map float32 to uint32 so that the unsigned order is the order of the floats."""
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _keep_largest(values: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """Mark the largest values whose weights together reach `target`, ties with the last included.

    The threshold is found bit by bit: 32 counts over the vocabulary. A sort of 49,152 logits is slower on one
    device and on a tensor mesh gathers them; here only one number per row crosses devices.

    Args:
        values: `[B, V]` ordered as unsigned integers.
        weights: `[B, V]` what each value adds: 1 to count, its probability to measure mass.
        target: Scalar to reach. When all values together do not reach it, all are kept.
    """

    def try_bit(step: jax.Array, threshold: jax.Array) -> jax.Array:
        bit = jax.lax.shift_left(jnp.uint32(1), jnp.uint32(31) - step.astype(jnp.uint32))
        candidate = threshold | bit
        total = jnp.sum(jnp.where(values >= candidate, weights, 0), axis=-1, keepdims=True)
        return jnp.where(total >= target, candidate, threshold)

    start = jnp.zeros((*values.shape[:-1], 1), jnp.uint32)
    return values >= jax.lax.fori_loop(0, 32, try_bit, start)


def restrict_logits(logits: jax.Array, kind: SamplingKind, numbers: jax.Array) -> jax.Array:
    """Apply temperature, top-k and top-p to the logits.

    Args:
        logits: `[B, V]`.
        kind: Which of the cuts are on; not greedy.
        numbers: float32 `[temperature, top_k, top_p]`.

    Returns:
        float32 `[B, V]`, minus infinity where a token may not be drawn.
    """
    logits = logits.astype(jnp.float32) / numbers[0]
    if kind.has_top_k:
        keep = _keep_largest(_ordered_bits(logits), jnp.ones_like(logits), numbers[1])
        logits = jnp.where(keep, logits, -jnp.inf)
    if kind.has_top_p:
        keep = _keep_largest(_ordered_bits(logits), jax.nn.softmax(logits, axis=-1), numbers[2])
        logits = jnp.where(keep, logits, -jnp.inf)
    return logits


def first_largest(logits: jax.Array) -> jax.Array:
    """Find the smallest index of the largest value of each row: int32 `[B]` from `[B, V]`.

    Two plain reductions: XLA's argmax is four times slower on CPU (8 x 49,152: 1.9 ms against 0.5 ms).
    """
    V = logits.shape[-1]
    largest = jnp.max(logits, axis=-1, keepdims=True)
    indices = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    # A row with a NaN equals its maximum nowhere and gives the last index.
    return jnp.min(jnp.where(logits == largest, indices, V - 1), axis=-1)


def draw_tokens(
    logits: jax.Array, kind: SamplingKind, numbers: jax.Array, key: jax.Array, rows: jax.Array, positions: jax.Array
) -> jax.Array:
    """Choose one token a row.

    A row's key is `key` folded with its global row number and the position of the token it draws, so a draw
    depends neither on the mesh, nor on the other rows, nor on where an earlier call stopped.

    Args:
        logits: `[B, V]`.
        kind: The static part of a `Sampling`.
        numbers: Its `numbers`.
        key: One PRNG key; not read when greedy.
        rows: int32 `[B]` global row numbers.
        positions: int32 `[B]` position, inside its own row, of the token to draw.

    Returns:
        int32 `[B]`.
    """
    if kind.is_greedy:
        return first_largest(logits)
    restricted = restrict_logits(logits, kind, numbers)

    def one(row_logits: jax.Array, row: jax.Array, position: jax.Array) -> jax.Array:
        row_key = jax.random.fold_in(jax.random.fold_in(key, row), position)
        return jax.random.categorical(row_key, row_logits)

    return jax.vmap(one)(restricted, rows, positions).astype(jnp.int32)
