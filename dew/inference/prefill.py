"""From ragged prompts to a filled cache and each row's first token.

Entry points: `prompt_rows` pads prompts on the host, `prefill_function` builds what is compiled. Rows are padded on
the left, so that every row's next token goes into one slot. Lengths go up to a bucket: a few programs serve all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dew.inference.sampling import SamplingKind, draw_tokens, tokens_seen
from dew.nn.cache import Cache
from dew.nn.sharding import constrain
from dew.placement.rules import Rule, resolve

SEEN_NAMES = ("activation_batch", "activation_vocab")
"""Names of which tokens a row holds, [B, V]."""
SMALLEST_PROMPT = 32
"""Slots of the smallest prefill. Shorter prompts cost a few padded tokens and save a compilation."""
SMALLEST_CACHE = 128
"""Slots of the smallest cache: read once per step, small beside the weights."""


@dataclasses.dataclass(frozen=True)
class PromptRows:
    """Prompts as one array, on the host.

    Attributes:
        tokens: int32 `[B, P]`, padded on the left with 0. Rows past the prompts given hold a single token.
        lengths: int32 `[B]`, tokens of each row's prompt.
        budgets: int32 `[B]`, how many tokens each row may get; 0 in the rows past the prompts given.
        rows: int32 `[B]`, global number of each row.
        slots: Slots of the cache that holds the prompts and everything they may get.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    budgets: np.ndarray
    rows: np.ndarray
    slots: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.lengths.max())


class RequestArrays(NamedTuple):
    """What both programs are told about a call, as placed arrays."""

    lengths: jax.Array
    """int32 `[B]`, tokens of each prompt."""
    budgets: jax.Array
    """int32 `[B]`, new tokens each row may get."""
    rows: jax.Array
    """int32 `[B]`, global row numbers."""
    longest: jax.Array
    """int32 scalar, tokens of the longest prompt."""
    stop_ids: jax.Array
    """int32 `[n]`, tokens that end a row, padded with -1."""
    numbers: jax.Array
    """float32 `[5]`, `Sampling.numbers`."""
    key_data: jax.Array
    """uint32, the numbers of a PRNG key."""


def bucket_length(length: int, smallest: int, largest: int) -> int:
    """Round a length up to a power of two of at least `smallest`, and no more than `largest`."""
    bucket = smallest
    while bucket < length:
        bucket *= 2
    return max(length, min(bucket, largest))


def prompt_rows(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    vocab_size: int,
    max_length: int,
    row_divisor: int,
    first_row: int = 0,
) -> PromptRows:
    """Check prompts and lay them out as rows.

    Args:
        prompts: Token ids of each prompt.
        max_new_tokens: How many tokens each row may get, one number for all or one per row.
        vocab_size: Ids are below it.
        max_length: Context of the model in tokens, prompt and new tokens together.
        row_divisor: The number of rows is padded to a multiple of it.
        first_row: Global number of the first prompt.

    Returns:
        The rows.

    Raises:
        TypeError: If a prompt is not a sequence of whole numbers.
        ValueError: If there is no prompt, a prompt is empty, an id is outside the vocabulary, or a prompt with its new
            tokens does not fit the context.
    """
    arrays = [_checked_prompt(row, prompt, vocab_size) for row, prompt in enumerate(prompts)]
    if not arrays:
        raise ValueError("generate needs at least one prompt. Received: prompts=[]")
    budgets = _checked_budgets(max_new_tokens, len(arrays))
    for row, (prompt, budget) in enumerate(zip(arrays, budgets, strict=True)):
        if len(prompt) >= max_length:
            raise ValueError(
                f"Prompt {row} has {len(prompt)} tokens, which leaves no room in the model's context of {max_length}. "
                f"Shorten it to {max_length - 1} tokens or fewer."
            )
        if len(prompt) + budget > max_length:
            raise ValueError(
                f"Prompt {row} has {len(prompt)} tokens; with max_new_tokens={budget} that exceeds the model's context "
                f"of {max_length}. Use max_new_tokens={max_length - len(prompt)} or fewer."
            )
    longest = max(len(prompt) for prompt in arrays)
    count = -(-len(arrays) // row_divisor) * row_divisor
    tokens = np.zeros((count, bucket_length(longest, SMALLEST_PROMPT, max_length)), np.int32)
    lengths = np.ones(count, np.int32)
    for row, prompt in enumerate(arrays):
        tokens[row, tokens.shape[1] - len(prompt) :] = prompt
        lengths[row] = len(prompt)
    return PromptRows(
        tokens=tokens,
        lengths=lengths,
        budgets=np.asarray([*budgets, *[0] * (count - len(arrays))], np.int32),
        rows=np.arange(first_row, first_row + count, dtype=np.int32),
        slots=bucket_length(longest + max(budgets), SMALLEST_CACHE, max_length),
    )


def _checked_prompt(row: int, prompt: Sequence[int], vocab_size: int) -> np.ndarray:
    array = np.asarray(prompt)
    if array.size == 0:
        raise ValueError(f"Prompt {row} is empty. Give it at least one token, for example the beginning-of-text token.")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"Prompt {row} must be a flat list of token ids. Received: {prompt!r}")
    if array.min() < 0 or array.max() >= vocab_size:
        wrong = int(array.min() if array.min() < 0 else array.max())
        raise ValueError(
            f"Prompt {row} holds token id {wrong}, outside the vocabulary of {vocab_size}. "
            "Encode it with the tokenizer of this model."
        )
    return array.astype(np.int32)


def _checked_budgets(max_new_tokens: int | Sequence[int], count: int) -> list[int]:
    budgets = np.asarray(max_new_tokens)
    if not np.issubdtype(budgets.dtype, np.integer) or (budgets < 1).any():
        raise ValueError(f"max_new_tokens must be 1 or more. Received: max_new_tokens={max_new_tokens!r}")
    if budgets.ndim and budgets.shape != (count,):
        raise ValueError(
            f"max_new_tokens must be one number, or one for each of the {count} prompts. "
            f"Received: max_new_tokens={max_new_tokens!r}"
        )
    return [int(budget) for budget in np.broadcast_to(budgets, (count,))]


def prefill_function(module: Any, kind: SamplingKind, key_impl: str, slots: int) -> Callable[..., Any]:
    """Build the function that runs the prompts and draws each row's first token.

    Args:
        module: The model.
        kind: How tokens are drawn.
        key_impl: Name of the PRNG of the key's data.
        slots: Slots of the cache it returns.

    Returns:
        Function of (variables, tokens `[B, P]`, request) giving the first token `[B]`, whether its logits were numbers
        `[B]`, the cache with the slots of the longest prompt used, and the tokens of each prompt `[B, V]`, None where
        the kind has no penalty.
    """

    def run_prompts(variables: Any, tokens: jax.Array, request: RequestArrays) -> tuple[Any, ...]:
        B, P = tokens.shape
        before = jnp.arange(P, dtype=jnp.int32)[None, :] - (P - request.lengths[:, None])
        hidden, cache = module.apply(
            variables,
            tokens,
            positions=jnp.maximum(before, 0),
            segment_ids=(before >= 0).astype(jnp.int32),
            cache=module.init_cache(B, P),
            method="hidden_states",
        )
        logits = last_logits(module, variables, hidden)
        key = jax.random.wrap_key_data(request.key_data, impl=key_impl)
        seen = None
        if kind.has_penalty:
            seen = constrain(tokens_seen(tokens, before >= 0, logits.shape[-1]), SEEN_NAMES)
        token = draw_tokens(logits, kind, request.numbers, key, request.rows, request.lengths, seen)
        return token, rows_are_finite(logits), reseated_cache(cache, request.longest, slots), seen

    return run_prompts


def last_logits(module: Any, variables: Any, hidden: jax.Array) -> jax.Array:
    """Score the vocabulary after each row's last token: float32 `[B, V]` from hidden states `[B, T, D]`."""
    return module.logits(variables, hidden[:, -1:])[:, 0]


def rows_are_finite(logits: jax.Array) -> jax.Array:
    """Say for each row of `[B, V]` whether its largest logit is a number; one NaN makes it NaN."""
    return jnp.isfinite(jnp.max(logits, axis=-1))


def reseated_cache(cache: Cache, used: jax.Array, slots: int) -> Cache:
    """Move the last `used` slots of a full cache to the front of one with room for new tokens.

    The columns that pad every row go: what must fit the cache is the longest prompt, not its bucket.

    Args:
        cache: A cache whose every slot is written, `P` slots.
        used: int32 scalar, slots to keep.
        slots: Slots `S` of the result, at least `P`.
    """
    P = cache.length
    assert slots >= P, f"a cache of {slots} slots cannot hold a prefill of {P}"

    def moved(array: jax.Array, axis: int) -> jax.Array:
        room = [(0, slots if dim == axis else 0) for dim in range(array.ndim)]
        return jax.lax.dynamic_slice_in_dim(jnp.pad(array, room), P - used, slots, axis)

    return dataclasses.replace(
        cache,
        banks=tuple(bank.with_slots(moved) for bank in cache.banks),
        valid=moved(cache.valid, 1),
        index=jnp.asarray(used, jnp.int32),
    )


@functools.lru_cache(maxsize=64)
def cache_shardings(module: Any, mesh: Mesh, rules: tuple[Rule, ...], rows: int, slots: int) -> Cache:
    """Place a cache: rows over the data axes, heads over tensor, whole where they do not divide.

    Args:
        module: The model.
        mesh: A mesh with the six axes.
        rules: Logical rules.
        rows: Rows `B`.
        slots: Slots `S`.

    Returns:
        The cache's tree with a NamedSharding per leaf.
    """
    shapes = jax.eval_shape(lambda: module.init_cache(rows, slots))

    def placed(leaf: jax.ShapeDtypeStruct, names: tuple[str | None, ...]) -> NamedSharding:
        return NamedSharding(mesh, resolve(names, leaf.shape, mesh, rules).spec)

    return jax.tree.map(placed, shapes, shapes.logical_names())


def seen_sharding(module: Any, mesh: Mesh, rules: tuple[Rule, ...], rows: int) -> NamedSharding:
    """Place the marks of which tokens each row holds: rows over the data axes, the vocabulary over tensor.

    Args:
        module: The model.
        mesh: A mesh with the six axes.
        rules: Logical rules.
        rows: Rows `B`.
    """
    return NamedSharding(mesh, resolve(SEEN_NAMES, (rows, module.vocab_size), mesh, rules).spec)
