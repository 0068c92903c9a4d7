"""Token-by-token generation with a sharded cache: one compiled loop that stops when every row has stopped.

Entry point: `generate`. The loop's length, the sampling numbers, the stop tokens and the seed are arguments of the
program, so that only shapes, the mesh and the kind of draw compile anew.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dew.inference.decode_mesh import decode_mesh, decode_view
from dew.inference.layer_views import decodes_layer_by_layer, layer_views
from dew.inference.prefill import (
    SEEN_NAMES,
    RequestArrays,
    cache_shardings,
    last_logits,
    prefill_function,
    prompt_rows,
    rows_are_finite,
    seen_sharding,
)
from dew.inference.programs import compiled_program
from dew.inference.sampling import Greedy, Sampling, SamplingKind, Strategy, as_sampling, draw_tokens, with_token
from dew.nn.sharding import constrain
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, as_mesh, batch_divisor, build_mesh
from dew.placement.partition import batch_sharding
from dew.placement.stacks import stack_view

STOP_SLOTS = 8
"""Stop tokens are padded to a multiple of this: another one rarely compiles anew."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What `generate` returns, on the host.

    Attributes:
        prompts: The token ids given, per row.
        tokens: The new token ids, per row; a row that stopped ends in its stop token.
        stopped: Per row, whether a stop token ended it; otherwise its budget did.
    """

    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    stopped: tuple[bool, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many new tokens each row has, its stop token included."""
        return tuple(len(row) for row in self.tokens)

    @property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """Prompt and new tokens of each row together."""
        return tuple(prompt + row for prompt, row in zip(self.prompts, self.tokens, strict=True))


class _Draw(NamedTuple):
    """How tokens are drawn: the static part, the numbers, and the key as data with its generator's name."""

    kind: SamplingKind
    numbers: np.ndarray
    key_data: np.ndarray
    key_impl: str


class DecodeState(NamedTuple):
    """What the loop carries from one token to the next."""

    token: jax.Array
    """int32 `[B]`, the token drawn last, not yet in the cache."""
    drawn: jax.Array
    """int32 scalar, how many tokens a row that is still active has."""
    tokens: jax.Array
    """int32 `[B, S]`, the new tokens."""
    counts: jax.Array
    """int32 `[B]`, how many of them count."""
    active: jax.Array
    """bool `[B]`, rows that go on."""
    stopped: jax.Array
    """bool `[B]`, rows ended by a stop token."""
    finite: jax.Array
    """bool `[B]`, rows whose logits were numbers at every token."""
    cache: Any
    """Keys and values of everything before `token`."""
    seen: Any
    """bool `[B, V]`, the tokens that a row holds, `token` included; None where the draw has no penalty."""


def decode_function(module: Any, kind: SamplingKind, key_impl: str, slots: int) -> Callable[..., Any]:
    """Build the loop that draws the second and every later token.

    Args:
        module: The model.
        kind: How tokens are drawn.
        key_impl: Name of the PRNG of the key's data.
        slots: Slots of the cache, and of the rows of new tokens.

    Returns:
        Function of (variables, cache, first token, whether its logits were numbers, request, tokens of the prompts)
        giving new tokens `[B, S]`, counts `[B]`, stopped `[B]`, finite `[B]` and the cache.
    """

    def run_steps(
        variables: Any, cache: Any, token: jax.Array, finite: jax.Array, request: RequestArrays, seen: Any
    ) -> Any:
        key = jax.random.wrap_key_data(request.key_data, impl=key_impl)

        def record(state: DecodeState, token: jax.Array, finite: jax.Array, cache: Any) -> DecodeState:
            written = jnp.where(state.active, token, 0)
            counts = state.counts + state.active
            stopped = state.stopped | (state.active & (token[:, None] == request.stop_ids[None, :]).any(axis=-1))
            return DecodeState(
                token=token,
                drawn=state.drawn + 1,
                tokens=jax.lax.dynamic_update_slice(state.tokens, written[:, None], (0, state.drawn)),
                counts=counts,
                active=state.active & ~stopped & (counts < request.budgets),
                stopped=stopped,
                finite=state.finite & (finite | ~state.active),
                cache=cache,
                seen=None if state.seen is None else constrain(with_token(state.seen, token), SEEN_NAMES),
            )

        def step(state: DecodeState) -> DecodeState:
            # A token's position counts from the start of its own prompt, whatever slot it has.
            positions = request.lengths + state.drawn - 1
            hidden, cache = module.apply(
                variables, state.token[:, None], positions=positions[:, None], cache=state.cache, method="hidden_states"
            )
            logits = last_logits(module, variables, hidden)
            token = draw_tokens(logits, kind, request.numbers, key, request.rows, positions + 1, state.seen)
            return record(state, token, rows_are_finite(logits), cache)

        B = token.shape[0]
        start = DecodeState(
            token=token,
            drawn=jnp.int32(0),
            tokens=jnp.zeros((B, slots), jnp.int32),
            counts=jnp.zeros(B, jnp.int32),
            active=request.budgets > 0,
            stopped=jnp.zeros(B, bool),
            finite=jnp.ones(B, bool),
            cache=cache,
            seen=seen,
        )
        end = jax.lax.while_loop(lambda state: state.active.any(), step, record(start, token, finite, cache))
        return end.tokens, end.counts, end.stopped, end.finite, end.cache

    return run_steps


def generate(
    module: Any,
    variables: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Strategy = Greedy(),
    key: int | jax.Array | None = None,
    stop_token_ids: Iterable[int] = (),
    mesh: Mesh | MeshSpec | None = None,
    layout: Layout | None = None,
    first_row: int = 0,
) -> Generation:
    """Continue prompts of token ids.

    A row's tokens depend neither on the other rows nor on the mesh. Every process of a run calls it with the same
    arguments and gets the same result. Sequence and stage axes of the mesh serve as data (`dew.inference.decode_mesh`);
    the variables stay where they are.

    Args:
        module: A decoder with a cache, such as `CausalTransformer`.
        variables: Its variables, placed.
        prompts: Token ids per row, of any lengths.
        max_new_tokens: How many tokens each row may get, one number for all or one per row.
        sampling: How tokens are drawn.
        key: Seed or PRNG key of the draws. Greedy needs none.
        stop_token_ids: A row ends with the first of these it draws.
        mesh: Mesh that the variables are placed on; None finds it from them.
        layout: Rules to trace under; None means the defaults.
        first_row: Global number of the first prompt: prompts cut into several calls draw as in one.

    Returns:
        The new tokens.

    Raises:
        TypeError: If a prompt is not a list of ids, or sampling is no strategy.
        ValueError: If a prompt is empty, does not fit the context or leaves the vocabulary, if a draw is asked for
            without a key, or if the mesh is not the variables'.
        LayoutRefused: If pipeline stages hold the variables in parts: who owns them moves them first.
        FloatingPointError: If the model's logits stopped being numbers.
    """
    draw = _checked_draw(as_sampling(sampling), key)
    stored = mesh_of_variables(variables, mesh)
    mesh = decode_mesh(stored)
    if mesh is not stored:
        variables = decode_view(variables, mesh)
    layout = Layout() if layout is None else layout
    host = prompt_rows(
        prompts,
        max_new_tokens,
        vocab_size=module.vocab_size,
        max_length=module.max_length,
        row_divisor=batch_divisor(mesh),
        first_row=first_row,
    )
    whole, by_row = NamedSharding(mesh, PartitionSpec()), batch_sharding(mesh)
    request = RequestArrays(
        lengths=_placed(host.lengths, by_row),
        budgets=_placed(host.budgets, by_row),
        rows=_placed(host.rows, by_row),
        longest=_placed(np.int32(host.longest), whole),
        stop_ids=_placed(_stop_ids(stop_token_ids, module.vocab_size), whole),
        numbers=_placed(draw.numbers, whole),
        key_data=_placed(draw.key_data, whole),
    )
    tokens, counts, stopped, finite = _run(
        module, variables, host.tokens, host.slots, request, draw, mesh, tuple(layout.rules)
    )
    if not finite[: len(prompts)].all():
        row = int(np.argmin(finite[: len(prompts)]))
        raise FloatingPointError(
            f"The model's logits for prompt {row} are not finite, so its tokens mean nothing. "
            "Check that the weights are finite; a float16 or bfloat16 model may need dtype='float32'."
        )
    return Generation(
        prompts=tuple(tuple(int(token) for token in prompt) for prompt in prompts),
        tokens=tuple(tuple(tokens[row, : counts[row]].tolist()) for row in range(len(prompts))),
        stopped=tuple(stopped[: len(prompts)].tolist()),
    )


def _run(
    module: Any,
    variables: Any,
    tokens: np.ndarray,
    slots: int,
    request: RequestArrays,
    draw: _Draw,
    mesh: Mesh,
    rules: Any,
) -> tuple[np.ndarray, ...]:
    """Run the two programs; new tokens, counts, stopped and finite of every row, on the host."""
    whole, by_row = NamedSharding(mesh, PartitionSpec()), batch_sharding(mesh)
    stacks = stack_view(module)
    is_split = decodes_layer_by_layer(module, variables, stacks, mesh)
    stepper = module.clone(scan_layers=False) if is_split else module
    placements = cache_shardings(module, mesh, rules, tokens.shape[0], slots)
    compiled = functools.partial(
        compiled_program, key=(module, draw.kind, draw.key_impl, slots, is_split), mesh=mesh, rules=rules
    )

    prompts = (variables, _placed(tokens, by_row), request)
    prefill = compiled(
        "prefill",
        prefill_function(module, draw.kind, draw.key_impl, slots),
        prompts,
        out_shardings=(by_row, by_row, placements, seen_sharding(module, mesh, rules, tokens.shape[0])),
    )
    token, finite, cache, seen = prefill(*prompts)

    steps = (layer_views(variables, stacks) if is_split else variables, cache, token, finite, request, seen)
    decode = compiled(
        "decode",
        decode_function(stepper, draw.kind, draw.key_impl, slots),
        steps,
        out_shardings=(whole, whole, whole, whole, placements),
        donate=(1,),
    )
    *results, _ = decode(*steps)
    return tuple(np.asarray(result) for result in results)


def _placed(array: Any, sharding: NamedSharding) -> jax.Array:
    """Place a host array that every process holds whole."""
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def mesh_of_variables(variables: Any, mesh: Mesh | MeshSpec | None = None) -> Mesh:
    """Find the mesh that variables are placed on, or check that it is the one given.

    Args:
        variables: Placed arrays.
        mesh: What the caller says it is; None asks the arrays.

    Returns:
        A mesh with the six axes. Arrays of one device that name no mesh are on the mesh of that device alone.

    Raises:
        ValueError: If the arrays are not all on the devices of one mesh.
    """
    leaves = jax.tree.leaves(variables)
    if not leaves or not all(isinstance(leaf, jax.Array) for leaf in leaves):
        raise ValueError(
            "variables must be a tree of placed jax arrays, such as dew.load_pretrained(source, mesh=...).variables. "
            f"Received: {sorted({type(leaf).__name__ for leaf in leaves}) or 'no leaves'}"
        )
    if mesh is None:
        named = next((leaf.sharding for leaf in leaves if isinstance(leaf.sharding, NamedSharding)), None)
        if named is not None:
            found = as_mesh(cast(Mesh, named.mesh))
        else:
            found = build_mesh(MeshSpec(), sorted(leaves[0].sharding.device_set, key=lambda device: device.id))
    else:
        found = as_mesh(mesh)
    expected = set(found.devices.flat)
    for leaf in leaves:
        if leaf.sharding.device_set != expected:
            raise ValueError(
                f"The variables are not placed on the mesh: one of shape {leaf.shape} is on "
                f"{len(leaf.sharding.device_set)} device(s), the mesh {dict(found.shape)} has {len(expected)}. "
                "Load them with mesh=, or place them with jax.device_put(variables, layout.shardings(mesh, variables))."
            )
    return found


def _checked_draw(sampling: Sampling, key: int | jax.Array | None) -> _Draw:
    """Take a sampling record and a key apart into what is compiled and what is an argument."""
    if key is None:
        if not sampling.kind.is_greedy:
            raise ValueError("Drawing tokens needs a seed: pass key=0, or sampling=Greedy(). Received: key=None")
        key = 0
    if isinstance(key, int | np.integer):
        key = jax.random.key(int(key))
    if not jax.dtypes.issubdtype(getattr(key, "dtype", np.dtype(object)), jax.dtypes.prng_key):
        raise TypeError(f"key must be a whole number or a key of jax.random.key. Received: key={key!r}")
    data = np.asarray(jax.random.key_data(key))
    return _Draw(sampling.kind, sampling.numbers, data, str(jax.random.key_impl(key)))


def _stop_ids(stop_token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """The stop tokens, padded with -1, which no token equals."""
    ids = sorted({int(token) for token in stop_token_ids})
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(
            f"stop_token_ids {outside} are outside the vocabulary of {vocab_size}. Use the tokenizer's ids."
        )
    padded = np.full(-(-max(len(ids), 1) // STOP_SLOTS) * STOP_SLOTS, -1, np.int32)
    padded[: len(ids)] = ids
    return padded
