"""The decoder: banks, caches, packing, padding and recomputation change where it computes, not what."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.nn.moe import ExpertsSpec
from dew.nn.norm import NormSpec
from dew.nn.router import RouterSpec
from dew.nn.sharding import unboxed
from dew.parallel.vocabulary import sharded_token_loss
from dew.placement.stacks import stack_view
from dew.tree import map_named, named_leaves
from tests.tiny import VOCAB_SIZE, tiny_batch, tiny_decoder, tiny_layer

MIXED = (tiny_layer(), tiny_layer(), tiny_layer(qk_norm=NormSpec(eps=1e-6)), tiny_layer(), tiny_layer())
TOKENS = tiny_batch()["tokens"][:, :-1]


@functools.cache
def variables_of(module, seed=0):
    return unboxed(jax.jit(module.init)(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32)))


def logical(module, tree):
    return named_leaves(stack_view(module).unstack(tree))


def loss_and_gradients(module, variables, tokens=TOKENS):
    def loss(variables):
        hidden = module.apply(variables, tokens[:, :-1], method="hidden_states")
        weights = jnp.ones(tokens[:, 1:].shape)
        return sharded_token_loss(None, hidden, module.head_weight(variables), tokens[:, 1:], weights)[0]

    return jax.jit(jax.value_and_grad(loss))(variables)


def assert_close(got, want):
    assert got.keys() == want.keys()
    for path, leaf in want.items():
        scale = np.max(np.abs(leaf))
        assert scale > 0, f"{path} is zero: the test could not fail"
        np.testing.assert_allclose(got[path], leaf, rtol=0, atol=1e-5 * scale, err_msg=path)


BANKS = [{"bank_layers": 3}, {"bank_layers": 1}, {"scan_layers": False}]


@pytest.mark.parametrize("storage", BANKS, ids=str)
@pytest.mark.parametrize("layers", [(tiny_layer(),) * 5, MIXED], ids=["alike", "mixed"])
def test_storage_changes_neither_initial_values_nor_the_training(storage, layers):
    scanned, other = tiny_decoder(layers=layers), tiny_decoder(layers=layers, **storage)
    start, other_start = variables_of(scanned), variables_of(other)
    want = logical(scanned, start)
    got = logical(other, other_start)
    assert got.keys() == want.keys()
    for path, leaf in want.items():
        np.testing.assert_array_equal(got[path], leaf, err_msg=path)
    loss, gradients = loss_and_gradients(scanned, start)
    other_loss, other_gradients = loss_and_gradients(other, other_start)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    assert_close(logical(other, other_gradients), logical(scanned, gradients))


def test_runs_of_equal_layers_are_banks_and_a_layer_alone_is_itself():
    names = {bank.name: bank.layers for bank in tiny_decoder(layers=MIXED).stack_view().banks}
    assert names == {"layers_0_1": ("layers_0", "layers_1"), "layers_3_4": ("layers_3", "layers_4")}
    assert set(variables_of(tiny_decoder(layers=MIXED))["params"]) == {
        "embed_tokens", "layers_0_1", "layers_2", "layers_3_4", "norm",
    }  # fmt: skip
    assert [bank.name for bank in tiny_decoder(num_layers=5, bank_layers=2).stack_view().banks] == [
        "layers_0_1",
        "layers_2_3",
    ]
    assert tiny_decoder(scan_layers=False).stack_view().banks == ()


def test_layers_and_seeds_draw_different_values():
    kernels = variables_of(tiny_decoder())["params"]["layers_0_3"]["mlp"]["up_proj"]["kernel"]
    other = variables_of(tiny_decoder(), seed=1)["params"]["layers_0_3"]["mlp"]["up_proj"]["kernel"]
    for layer in (*kernels[1:], other[0]):
        assert abs(np.corrcoef(np.ravel(kernels[0]), np.ravel(layer))[0, 1]) < 0.1
    np.testing.assert_allclose(np.std(kernels), 0.02, rtol=0.05)


@pytest.mark.parametrize("layers", [(tiny_layer(),) * 4, MIXED], ids=["alike", "mixed"])
@pytest.mark.parametrize("prompt", [1, 5])
def test_decoding_token_by_token_is_the_full_forward(layers, prompt):
    module = tiny_decoder(layers=layers)
    variables = variables_of(module)
    want = jax.jit(module.apply)(variables, TOKENS)
    run = jax.jit(lambda tokens, cache: module.apply(variables, tokens, cache=cache))
    cache = module.init_cache(len(TOKENS), 20)
    logits, cache = run(TOKENS[:, :prompt], cache)
    got = [logits]
    for step in range(prompt, TOKENS.shape[1]):
        logits, cache = run(TOKENS[:, step : step + 1], cache)
        got.append(logits)
    np.testing.assert_allclose(jnp.concatenate(got, axis=1), want, atol=1e-5 * float(jnp.max(jnp.abs(want))))
    assert int(cache.index) == TOKENS.shape[1]


CHUNKED = (tiny_layer(chunk=4), tiny_layer(chunk=3, window=2, sinks=True))


@pytest.mark.parametrize("layers", [(tiny_layer(),) * 4, CHUNKED], ids=["plain", "chunked"])
def test_a_left_padded_row_is_the_row_alone(layers):
    module = tiny_decoder(layers=layers)
    variables = variables_of(module)
    row = TOKENS[:1, :6]
    padded = np.concatenate([np.full((1, 4), 9), row], axis=1)
    real = np.array([[0] * 4 + [1] * 6])
    alone, cache = module.apply(variables, row, cache=module.init_cache(1, 12))
    got, padded_cache = module.apply(variables, padded, segment_ids=real, cache=module.init_cache(1, 12))
    np.testing.assert_allclose(got[:, 4:], alone, atol=1e-6)
    new = np.array([[7]])
    want, _ = module.apply(variables, new, cache=cache)
    got, _ = module.apply(variables, new, cache=padded_cache)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_the_cache_is_updated_in_place():
    module = tiny_decoder()
    variables = variables_of(module)
    slots = 512
    cache = module.init_cache(8, slots)

    def decode(variables, cache):
        def step(state, _):
            token, cache = state
            logits, cache = module.apply(variables, token, cache=cache)
            return (jnp.argmax(logits, axis=-1).astype(jnp.int32), cache), None

        return jax.lax.scan(step, (jnp.zeros((8, 1), jnp.int32), cache), length=8)[0]

    program = jax.jit(decode, donate_argnums=1).lower(variables, cache).compile()
    memory = program.memory_analysis()
    whole = sum(array.nbytes for array in jax.tree.leaves(cache.banks))
    assert memory.alias_size_in_bytes >= whole
    # The step's temporaries are one layer's attention, not another cache.
    assert memory.temp_size_in_bytes < whole


@pytest.mark.parametrize("layers", [(tiny_layer(),) * 4, CHUNKED], ids=["plain", "chunked"])
def test_packed_documents_are_the_documents_alone(layers):
    module = tiny_decoder(layers=layers)
    variables = variables_of(module)
    first, second = TOKENS[0, :7], TOKENS[1, :5]
    packed = np.concatenate([first, second, [0, 0]])[None]
    segments = np.array([[1] * 7 + [2] * 5 + [0] * 2])
    positions = np.concatenate([np.arange(7), np.arange(5), [0, 0]])[None]
    got = module.apply(variables, packed, positions, segments)[0]
    np.testing.assert_allclose(got[:7], module.apply(variables, first[None])[0], atol=1e-6)
    np.testing.assert_allclose(got[7:12], module.apply(variables, second[None])[0], atol=1e-6)
    assert np.isfinite(got).all()
    mixed = module.apply(variables, packed)[0]
    assert np.max(np.abs(mixed[7:12] - got[7:12])) > 1e-3, "documents that read each other must differ"


@functools.cache
def routed(capacity):
    """Build the function of hidden states and what the router of one layer says, with weights that choose decidedly."""
    experts = ExpertsSpec(num_experts=4, features=16, router=RouterSpec(top_k=2), capacity_factor=capacity)
    module = tiny_decoder(layers=(dataclasses.replace(tiny_layer(), mlp=experts),))
    variables = map_named(lambda path, leaf: 50 * leaf if "/router/" in path else leaf, variables_of(module))
    return jax.jit(functools.partial(module.apply, variables, method="routed_hidden_states"))


def test_routers_say_of_packed_documents_what_they_say_of_each_alone():
    first, second = TOKENS[:1, :6], TOKENS[1:2, :6]
    packed, segments = np.concatenate([first, second, [[9, 9]]], axis=1), np.array([[1] * 6 + [2] * 6 + [0] * 2])
    positions = np.concatenate([np.arange(6), np.arange(6), [0, 0]])[None]
    _, (got,) = routed(None)(packed, np.asarray(segments > 0, np.float32), positions, segments)
    alone = [routed(None)(row, np.ones(row.shape, np.float32))[1][0] for row in (first, second)]
    jax.tree.map(lambda a, *b: np.testing.assert_allclose(a, sum(b), rtol=1e-5), got, *alone)


def test_padding_leaves_experts_the_room_that_a_row_has_alone():
    row, counted = TOKENS[:1, :9], np.ones((1, 9), np.float32)
    want, (alone,) = routed(0.75)(row, counted)
    padded = [np.pad(each, ((0, 0), (0, 7))) for each in (row, counted, np.arange(9)[None], np.ones((1, 9), np.int32))]
    got, (said,) = routed(0.75)(*padded)
    assert alone.dropped > 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), said, alone)
    np.testing.assert_allclose(got[:, :9], want, atol=1e-5)


@pytest.mark.parametrize("storage", [{}, {"scan_layers": False}], ids=str)
def test_recomputation_changes_no_gradient(storage):
    plain, full = (tiny_decoder(remat=remat, **storage) for remat in (None, "full"))
    loss, gradients = loss_and_gradients(plain, variables_of(plain))
    full_loss, full_gradients = loss_and_gradients(full, variables_of(plain))
    np.testing.assert_allclose(full_loss, loss, rtol=1e-6)
    assert_close(named_leaves(full_gradients), named_leaves(gradients))


def test_the_backward_pass_keeps_what_the_projections_read_and_no_weight():
    rows, length = 3, 11  # sizes that no weight has
    module = tiny_decoder()
    variables = variables_of(module)
    tokens = np.zeros((rows, length), np.int32)

    def loss(variables):
        return jnp.sum(module.apply(variables, tokens, method="hidden_states"))

    program = jax.make_jaxpr(jax.grad(loss))(variables)
    forward = next(eqn for eqn in program.eqns if eqn.primitive.name == "scan")
    kept = sorted(var.aval.size for var in forward.outvars[1:])  # the first is the residual stream, carried on
    tokens_per_bank = 4 * rows * length
    # Input and output of both norms and the mixed heads, 32 wide; queries, keys and values; one softmax; gate and up.
    widths = [*[32] * 5, 4 * 8, 2 * 8, 2 * 8, 4 * length, 64, 64]
    assert kept == sorted(tokens_per_bank * width for width in widths)


def residual_bytes(remat):
    module = tiny_decoder(num_layers=8, remat=remat)
    tokens = np.zeros((8, 64), np.int32)
    variables = jax.eval_shape(lambda: unboxed(module.init(jax.random.key(0), tokens)))

    def loss(variables):
        return jnp.sum(module.apply(variables, tokens, method="hidden_states"))

    program = jax.jit(jax.grad(loss)).lower(variables).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_full_recomputation_keeps_a_fraction_of_the_activations():
    assert residual_bytes("full") < residual_bytes(None) / 3


def test_a_token_reads_nothing_after_it():
    module = tiny_decoder()
    variables = variables_of(module)
    changed = np.array(TOKENS)
    changed[:, 9] = (changed[:, 9] + 1) % VOCAB_SIZE
    before, after = (module.apply(variables, tokens) for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (np.max(np.abs(before[:, 9:] - after[:, 9:]), axis=-1) > 1e-6).all()


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_the_head_scores_hidden_states(tie_embeddings):
    module = tiny_decoder(tie_embeddings=tie_embeddings)
    variables = variables_of(module)
    hidden = module.apply(variables, TOKENS, method="hidden_states")
    want = module.apply(variables, TOKENS)
    np.testing.assert_allclose(hidden @ module.head_weight(variables).T, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(module.logits(variables, hidden), want, rtol=1e-5, atol=1e-6)
    table = variables["params"]["embed_tokens"]["embedding"]
    assert (module.head_weight(variables) is table) == tie_embeddings
    assert want.shape == (*TOKENS.shape, VOCAB_SIZE)


def test_bfloat16_computes_in_bfloat16_and_scores_in_float32():
    module = tiny_decoder(dtype="bfloat16")
    variables = variables_of(module)
    assert module.apply(variables, TOKENS, method="hidden_states").dtype == jnp.bfloat16
    logits = module.apply(variables, TOKENS)
    assert logits.dtype == jnp.float32
    want = tiny_decoder().apply(variables, TOKENS)
    np.testing.assert_allclose(logits, want, atol=0.05 * float(jnp.max(jnp.abs(want))))
    _, gradients = loss_and_gradients(module, variables)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.float32.dtype}


def test_a_missing_weight_is_named():
    module = tiny_decoder()
    params = dict(variables_of(module)["params"])
    del params["norm"]
    with pytest.raises(Exception, match="norm"):
        module.apply({"params": params}, TOKENS)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("remat", "minimal", "remat policy 'minimal' is not available yet"),
        ("sequence_impl", "ulysses", "sequence_impl must be one of 'auto', 'all_to_all', 'gather', 'ring', 'banded'"),
        ("attention_impl", "flash", "attention_impl must be one of 'auto', 'xla', .*Received: attention_impl='flash'"),
        ("bank_layers", 0, "bank_layers must be None or positive. Received: bank_layers=0"),
    ],
)
def test_options_that_are_not_honoured_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        tiny_decoder(**{field: value})
