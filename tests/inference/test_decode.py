"""Generated tokens depend on the prompt, the weights and the key: not on the mesh, the batch, padding or the cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from dew.inference import Greedy, Sampling, Temperature, TopK, TopP, generate, programs
from dew.inference.decode import mesh_of_variables
from dew.inference.decode_mesh import decode_mesh, move_leaf_by_leaf, stored_axes
from dew.inference.prefill import cache_shardings, prompt_rows, reseated_cache
from dew.inference.programs import compilation_counts, forget_programs
from dew.placement import DEFAULT_RULES, Layout, LayoutRefused, MeshSpec, as_mesh, build_mesh
from dew.tree import named_leaves
from tests.tiny import VOCAB_SIZE, tiny_decoder
from tools.collectives import collectives

LAYOUT = Layout(min_shard=1, tolerance=0.0)
MESHES = {
    "data8": MeshSpec(),
    "fsdp8": MeshSpec(fsdp=8),
    "tensor4": MeshSpec(tensor=4),
    "tensor8": MeshSpec(tensor=8),
    "data2_fsdp2_tensor2": MeshSpec(fsdp=2, tensor=2),
    "sequence8": MeshSpec(sequence=8),
    "fsdp2_tensor2_sequence2": MeshSpec(fsdp=2, tensor=2, sequence=2),
    "tensor2_sequence2_stage2": MeshSpec(tensor=2, sequence=2, stage=2),
}
CONTEXT = 96


@functools.cache
def model():
    """A decoder whose greedy continuations wander: initial weights alone repeat one token."""
    module = tiny_decoder(max_length=CONTEXT, num_layers=2)
    boxed = jax.jit(module.init)(jax.random.key(1), jnp.zeros((1, 4), jnp.int32))
    return module, boxed, jax.tree.map(lambda leaf: leaf * 30 if leaf.ndim > 2 else leaf, nn.meta.unbox(boxed))


def placed(spec):
    """The same weights on a mesh, as split as they can be."""
    module, boxed, variables = model()
    mesh = as_mesh(spec)
    return module, jax.device_put(variables, LAYOUT.shardings(mesh, boxed)), mesh


def where_it_decodes(variables, mesh):
    """The same weights moved to where they can decode, when an axis that cannot holds them in parts."""
    if not (stored := stored_axes(variables)):
        return variables, mesh
    owner, target = [variables], decode_mesh(mesh, stored=stored)
    move_leaf_by_leaf(lambda: owner[0], lambda tree: owner.__setitem__(0, tree), LAYOUT.shardings(target, model()[1]))
    return owner[0], target


def prompts_of(lengths, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(1, VOCAB_SIZE, length).tolist() for length in lengths]


@functools.cache
def full_forward():
    module, _, variables = model()
    return jax.jit(lambda tokens: module.apply(variables, tokens))


def slow_greedy(prompt, count):
    """Greedy tokens from the whole sequence, run again for every token, without a cache and without padding."""
    row = list(prompt)
    for _ in range(count):
        tokens = np.zeros((1, CONTEXT), np.int32)
        tokens[0, : len(row)] = row
        row.append(int(np.argmax(full_forward()(tokens)[0, len(row) - 1])))
    return tuple(row[len(prompt) :])


PROMPTS = prompts_of([5, 17, 1, 30, 22, 8])
SAMPLERS = [Greedy(), TopP(p=0.9, temperature=1.3, k=30)]


def test_greedy_is_the_full_forward_repeated():
    module, _, variables = model()
    result = generate(module, variables, PROMPTS, max_new_tokens=24)
    assert result.tokens == tuple(slow_greedy(prompt, 24) for prompt in PROMPTS)
    assert result.lengths == (24,) * 6
    assert not any(result.stopped)
    assert result.sequences[2] == (*PROMPTS[2], *result.tokens[2])
    # The law says little about a model that repeats itself.
    assert min(len(set(row)) for row in result.tokens) > 8


def test_cached_logits_are_those_of_the_full_forward():
    module, _, variables = model()
    prompt = np.asarray(prompts_of([21]))
    want = module.apply(variables, jnp.asarray(prompt))
    P, start = 16, 9
    tokens = np.zeros((1, P), np.int32)
    tokens[0, P - start :] = prompt[0, :start]
    before = np.arange(P)[None] - (P - start)
    cache = module.init_cache(1, P)
    logits, cache = module.apply(
        variables, tokens, positions=np.maximum(before, 0), segment_ids=(before >= 0).astype(np.int32), cache=cache
    )
    np.testing.assert_allclose(logits[0, P - start :], want[0, :start], rtol=1e-5, atol=1e-5)
    cache = reseated_cache(cache, jnp.int32(start), 32)
    step = jax.jit(module.apply)
    for place in range(start, 21):
        logits, cache = step(variables, prompt[:, place : place + 1], positions=jnp.full((1, 1), place), cache=cache)
        np.testing.assert_allclose(logits[0, 0], want[0, place], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_a_row_in_a_ragged_batch_is_the_row_alone(sampler):
    module, _, variables = model()
    together = generate(module, variables, PROMPTS, max_new_tokens=16, sampling=sampler, key=5)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(module, variables, [prompt], max_new_tokens=16, sampling=sampler, key=5, first_row=row)
        assert alone.tokens[0] == together.tokens[row]


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_gives_the_tokens_of_one_device(name):
    module, variables, mesh = placed(MESHES[name])
    variables, mesh = where_it_decodes(variables, mesh)
    if mesh.shape["fsdp"] * mesh.shape["tensor"] > 1:
        whole = [
            path for path, leaf in named_leaves(variables).items() if leaf.size >= 2048 and not any(leaf.sharding.spec)
        ]
        # Four query heads do not divide over eight tensor shards: there attention stays whole.
        assert [path for path in whole if name != "tensor8" or "self_attn" not in path] == []
    greedy = generate(module, variables, PROMPTS, max_new_tokens=24, mesh=mesh, layout=LAYOUT)
    assert greedy.tokens == tuple(slow_greedy(prompt, 24) for prompt in PROMPTS)


@pytest.mark.parametrize("name", ["tensor8", "data2_fsdp2_tensor2", "fsdp2_tensor2_sequence2"])
def test_draws_do_not_depend_on_the_mesh(name):
    module, variables, _ = placed(MESHES[name])
    one, drawn = (
        generate(module, weights, PROMPTS, max_new_tokens=12, sampling=SAMPLERS[1], key=3)
        for weights in (model()[2], variables)
    )
    assert drawn == one


def test_a_penalty_on_repetition_counts_the_prompt_and_every_token_drawn():
    penalty, want = 1.6, []
    for prompt in PROMPTS[:3]:
        row = list(prompt)
        for _ in range(12):
            tokens = np.zeros((1, CONTEXT), np.int32)
            tokens[0, : len(row)] = row
            logits = np.array(full_forward()(tokens)[0, len(row) - 1])
            held = list(set(row))
            logits[held] = np.where(logits[held] < 0, logits[held] * penalty, logits[held] / penalty)
            row.append(int(np.argmax(logits)))
        want.append(tuple(row[len(prompt) :]))
    assert want != [slow_greedy(prompt, 12) for prompt in PROMPTS[:3]]
    sampling = Sampling(temperature=0.0, repetition_penalty=penalty)
    for spec in (None, MESHES["data2_fsdp2_tensor2"]):
        module, variables = (model()[0], model()[2]) if spec is None else placed(spec)[:2]
        result = generate(module, variables, PROMPTS[:3], max_new_tokens=12, sampling=sampling)
        assert result.tokens == tuple(want)


@pytest.mark.parametrize(
    "spec, rows, heads",
    [
        (MeshSpec(), "data", None),
        (MeshSpec(fsdp=8), "fsdp", None),
        (MeshSpec(tensor=2), "data", "tensor"),
        (MeshSpec(tensor=4), "data", None),
        (MeshSpec(fsdp=2, tensor=2), ("data", "fsdp"), "tensor"),
    ],
)
def test_the_cache_splits_rows_and_heads_where_they_divide(spec, rows, heads):
    module = model()[0]
    shardings = cache_shardings(module, build_mesh(spec), DEFAULT_RULES, 8, 128)
    bank = shardings.banks[0]
    padded = (*bank.keys.spec, None, None, None, None, None)[:5]
    assert padded == (None, rows, heads, None, None)
    assert bank.values.spec == bank.keys.spec


def test_a_row_ends_with_its_first_stop_token_and_the_others_go_on():
    module, _, variables = model()
    free = generate(module, variables, PROMPTS, max_new_tokens=20).tokens
    stops = {next(token for token in free[row][2:] if token not in free[5]) for row in (0, 3)}
    result = generate(module, variables, PROMPTS, max_new_tokens=20, stop_token_ids=stops)
    for row, tokens in enumerate(free):
        ends = [place for place, token in enumerate(tokens) if token in stops]
        assert result.tokens[row] == (tokens[: ends[0] + 1] if ends else tokens)
        assert result.stopped[row] == bool(ends)
    assert result.stopped[0]
    assert result.stopped[3]
    assert not all(result.stopped)


def test_rows_have_budgets_of_their_own():
    module, _, variables = model()
    free = generate(module, variables, PROMPTS, max_new_tokens=20).tokens
    budgets = [1, 20, 3, 7, 2, 12]
    result = generate(module, variables, PROMPTS, max_new_tokens=budgets)
    assert result.tokens == tuple(tokens[:budget] for tokens, budget in zip(free, budgets, strict=True))


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_going_on_from_a_result_draws_as_in_one_call(sampler):
    module, _, variables = model()
    whole = generate(module, variables, PROMPTS, max_new_tokens=12, sampling=sampler, key=jax.random.key(8))
    first = generate(module, variables, PROMPTS, max_new_tokens=5, sampling=sampler, key=jax.random.key(8))
    rest = generate(module, variables, first.sequences, max_new_tokens=7, sampling=sampler, key=jax.random.key(8))
    assert rest.sequences == whole.sequences


def test_seeds_repeat_and_differ():
    module, _, variables = model()
    draw = functools.partial(generate, module, variables, [[1, 2, 3]] * 6, max_new_tokens=16, sampling=SAMPLERS[1])
    assert draw(key=1) == draw(key=1)
    assert draw(key=1).tokens != draw(key=2).tokens
    assert len(set(draw(key=1).tokens)) == 6, "equal prompts in one call must not draw alike"


def test_a_prompt_may_fill_the_context_to_its_last_token():
    module, _, variables = model()
    prompt = prompts_of([CONTEXT - 3])
    assert generate(module, variables, prompt, max_new_tokens=3).tokens[0] == slow_greedy(prompt[0], 3)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"prompts": prompts_of([CONTEXT])},
            ValueError,
            "Prompt 0 has 96 tokens, which leaves no room .* context of 96. Shorten it to 95",
        ),
        (
            {"prompts": prompts_of([4, 90])},
            ValueError,
            "Prompt 1 has 90 tokens; with max_new_tokens=8 .* Use max_new_tokens=6 or fewer",
        ),
        ({"prompts": [[1], []]}, ValueError, "Prompt 1 is empty"),
        ({"prompts": []}, ValueError, "at least one prompt"),
        ({"prompts": [[1, VOCAB_SIZE]]}, ValueError, "Prompt 0 holds token id 64, outside the vocabulary of 64"),
        ({"prompts": [[-1]]}, ValueError, "Prompt 0 holds token id -1"),
        ({"prompts": ["text"]}, TypeError, "Prompt 0 must be a flat list of token ids"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be 1 or more"),
        ({"max_new_tokens": [1, 2]}, ValueError, "one for each of the 1 prompts"),
        ({"sampling": Temperature(1.0)}, ValueError, "Drawing tokens needs a seed: pass key=0"),
        ({"key": "7"}, TypeError, "key must be a whole number or a key of jax.random.key"),
        ({"stop_token_ids": [2, 999]}, ValueError, r"stop_token_ids \[999\] are outside the vocabulary"),
        ({"mesh": MeshSpec(fsdp=8)}, ValueError, "not placed on the mesh.*is on 1 device"),
    ],
)
def test_what_cannot_run_is_refused_before_tracing(change, error, message):
    module, _, variables = model()
    counts = compilation_counts()
    with pytest.raises(error, match=message):
        generate(module, variables, **({"prompts": [[1, 2]], "max_new_tokens": 8} | change))
    assert compilation_counts() == counts


def test_weights_that_stages_hold_in_parts_are_not_copied_behind_the_callers_back():
    module, variables, mesh = placed(MeshSpec(stage=2, fsdp=4))
    with pytest.raises(LayoutRefused, match=r"split as P.*'stage'.*Move the weights first.*stored=\('stage',\)"):
        generate(module, variables, [[1]], max_new_tokens=1, mesh=mesh)


def test_weights_that_are_not_numbers_are_an_error_not_tokens():
    module, _, variables = model()
    spoiled = jax.tree.map(lambda leaf: leaf, variables)
    spoiled["params"]["norm"]["scale"] = variables["params"]["norm"]["scale"] * jnp.nan
    with pytest.raises(FloatingPointError, match="logits for prompt 0 are not finite"):
        generate(module, spoiled, [[1, 2]], max_new_tokens=4)


def test_the_mesh_is_found_from_the_variables():
    _, variables, mesh = placed(MeshSpec(fsdp=4, tensor=2))
    assert mesh_of_variables(variables) == mesh
    alone = jax.device_put(model()[2], jax.devices()[3])
    assert list(mesh_of_variables(alone).devices.flat) == [jax.devices()[3]]
    with pytest.raises(ValueError, match="variables must be a tree of placed jax arrays"):
        mesh_of_variables({"params": np.zeros(3)})


def test_rows_are_padded_to_the_divisor_and_lengths_to_buckets():
    rows = prompt_rows([[1, 2, 3], [4]], [5, 9], vocab_size=10, max_length=4096, row_divisor=8, first_row=16)
    assert rows.tokens.shape == (8, 32)
    assert rows.tokens[0].tolist() == [0] * 29 + [1, 2, 3]
    assert rows.budgets.tolist() == [5, 9, 0, 0, 0, 0, 0, 0]
    assert rows.rows.tolist() == list(range(16, 24))
    assert (rows.longest, rows.slots) == (3, 128)
    assert prompt_rows([[1] * 100], 200, vocab_size=10, max_length=4096, row_divisor=1).slots == 512
    assert prompt_rows([[1] * 100], 200, vocab_size=10, max_length=400, row_divisor=1).slots == 400


def test_few_programs_serve_many_lengths_numbers_and_weights():
    module, _, variables = model()
    forget_programs()
    lengths = np.linspace(5, 60, 20).astype(int)
    for prompt in prompts_of(lengths):
        generate(module, variables, [prompt], max_new_tokens=36)
    counts = compilation_counts()
    assert counts["prefill"] <= 2
    assert counts["decode"] == 1
    # Other budgets, stop tokens and weights are arguments.
    prompt = prompts_of([9])
    base = generate(module, variables, prompt, max_new_tokens=20)
    shorter = generate(module, variables, prompt, max_new_tokens=7, stop_token_ids=[3, 60, 61])
    assert shorter.tokens[0] == base.tokens[0][: shorter.lengths[0]]
    changed = generate(module, jax.tree.map(jnp.negative, variables), prompt, max_new_tokens=20)
    assert changed.tokens != base.tokens
    assert compilation_counts() == counts
    # Another kind of draw compiles once; its numbers and the key do not.
    for key, sampler in enumerate([TopK(k=5), TopK(k=9, temperature=0.5), Sampling(top_k=2)]):
        generate(module, variables, prompt, max_new_tokens=20, sampling=sampler, key=key)
    assert compilation_counts() == {"prefill": counts["prefill"] + 1, "decode": 2}


@pytest.mark.parametrize("spec", [MeshSpec(fsdp=8), MeshSpec(tensor=2)], ids=["fsdp8", "tensor2"])
def test_a_token_costs_gathering_what_fsdp_stores_and_sums_of_activations_on_tensor(spec):
    module, variables, mesh = placed(spec)
    forget_programs()
    generate(module, variables, prompts_of([4] * 8), max_new_tokens=2, mesh=mesh, layout=LAYOUT)
    (text,) = (program.as_text() for key, program in programs._programs.items() if key[0] == "decode")
    # The loop over tokens has no trip count; the loop over layers in it does.
    found = [item for item in collectives(text, dict(mesh.shape)) if None in item.trips and item.trips[-1] == 2]
    gathered = sum(item.bytes for item in found if item.kind == "all-gather")
    blocks = jax.tree.leaves(variables["params"]["layers_0_1"])
    if spec.fsdp > 1:
        assert gathered == sum(leaf.nbytes for leaf in blocks) // 2, "the weights of one layer, in every turn"
    else:
        assert gathered == 0
        sums = [item for item in found if item.kind == "all-reduce"]
        assert [item.bytes for item in sums] == [2 * module.features * 4] * 2, "two rows of the residual stream"
