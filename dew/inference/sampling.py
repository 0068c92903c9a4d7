"""How the next token is drawn from the logits: a penalty on repetition, then greedy, temperature, top-k, top-p, min-p.

Entry points: `Sampling` (the record the engine reads), the strategies `Greedy`, `Temperature`, `TopK`, `TopP`,
and `draw_tokens`. The order is that of transformers. Top-p is nucleus sampling (https://arxiv.org/abs/1904.09751,
section 3.1), min-p https://arxiv.org/abs/2407.01082, the penalty https://arxiv.org/abs/1909.05858, section 4.1.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class SamplingKind(NamedTuple):
    """What of a `Sampling` shapes the compiled program; the numbers themselves are arguments."""

    is_greedy: bool
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool
    has_penalty: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution each new token is drawn from.

    Args:
        temperature: The logits are divided by it; 0 takes the largest logit and draws nothing.
        top_k: Keep the `top_k` largest logits (and what ties with the last of them); None keeps all.
        top_p: Then keep the fewest largest tokens whose probability reaches `top_p` (and what ties with the
            last of them); 1.0 keeps all.
        min_p: Then keep the tokens that are at least `min_p` times as likely as the likeliest; 0.0 keeps all.
        repetition_penalty: Before all that, logits of tokens that the row holds already, its prompt included, are
            divided by it where they are positive and multiplied where negative; 1.0 changes none. Greedy heeds it too.

    Raises:
        ValueError: If a number leaves no distribution to draw from.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

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
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be from 0 (keeps all) to 1. Received: min_p={self.min_p}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(
                "repetition_penalty must be a positive number (1 changes nothing). "
                f"Received: repetition_penalty={self.repetition_penalty}"
            )

    @property
    def kind(self) -> SamplingKind:
        """The part that changes the compiled program."""
        has_penalty = self.repetition_penalty != 1
        if self.temperature == 0:
            return SamplingKind(True, False, False, False, has_penalty)
        return SamplingKind(False, self.top_k is not None, self.top_p < 1, self.min_p > 0, has_penalty)

    @property
    def numbers(self) -> np.ndarray:
        """The part that is an argument: float32 `[temperature, top_k, top_p, min_p, repetition_penalty]`."""
        # Vocabularies stay far below 2**24, so a float32 holds every useful top_k exactly.
        top_k = min(self.top_k or 2**24, 2**24)
        numbers = [self.temperature, top_k, self.top_p, self.min_p, self.repetition_penalty]
        return np.asarray(numbers, np.float32)


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
    """Apply temperature, top-k, top-p and min-p to the logits.

    Args:
        logits: `[B, V]`.
        kind: Which of the cuts are on; not greedy.
        numbers: `Sampling.numbers`.

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
    if kind.has_min_p:
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(numbers[3])
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits


def tokens_seen(tokens: jax.Array, real: jax.Array, vocab_size: int) -> jax.Array:
    """Mark the tokens that each row holds: bool `[B, V]` from ids and whether they count, both `[B, P]`."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    marks = jnp.zeros((tokens.shape[0], vocab_size), bool)
    return marks.at[rows, jnp.where(real, tokens, vocab_size)].set(True, mode="drop")


def with_token(seen: jax.Array, token: jax.Array) -> jax.Array:
    """Mark one more token a row; elementwise, so that a vocabulary that is split stays so."""
    return seen | (jax.lax.broadcasted_iota(jnp.int32, seen.shape, 1) == token[:, None])


def penalised(logits: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """Make tokens that rows hold already less likely where the penalty is above 1: float32 `[B, V]`."""
    logits = logits.astype(jnp.float32)
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


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
    logits: jax.Array,
    kind: SamplingKind,
    numbers: jax.Array,
    key: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    seen: jax.Array | None = None,
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
        seen: bool `[B, V]` tokens that each row holds; None where the kind has no penalty.

    Returns:
        int32 `[B]`.
    """
    if kind.has_penalty:
        assert seen is not None, "who draws with a penalty marks the tokens of each row"
        logits = penalised(logits, seen, numbers[4])
    if kind.is_greedy:
        return first_largest(logits)
    restricted = restrict_logits(logits, kind, numbers)

    def one(row_logits: jax.Array, row: jax.Array, position: jax.Array) -> jax.Array:
        row_key = jax.random.fold_in(jax.random.fold_in(key, row), position)
        return jax.random.categorical(row_key, row_logits)

    return jax.vmap(one)(restricted, rows, positions).astype(jnp.int32)
