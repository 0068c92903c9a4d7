"""Dropout of a decoder: where its masks are, when they are drawn, and that storage and recomputation change none."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.kernels import attention_choice, dropout
from dew.nn.attention_report import attention_report
from dew.nn.embed import EmbeddingSpec
from dew.nn.mamba2 import Mamba2Spec
from dew.nn.moe import ExpertsSpec
from dew.nn.router import RouterSpec
from dew.objectives.language import LanguageModel
from dew.placement import MeshSpec, build_mesh
from tests.tiny import tiny_batch, tiny_decoder, tiny_layer

TOKENS = jnp.asarray(tiny_batch(rows=4)["tokens"])
KEY = jax.random.key(3)
RATES = {"dropout_rate": 0.2, "embedding_dropout_rate": 0.1, "attention_dropout_rate": 0.3}


def decoder(**fields):
    return tiny_decoder(**{"num_layers": 3, "embedding": EmbeddingSpec(positions=64), **RATES, **fields})


@functools.cache
def variables(**fields):
    return decoder(**fields).init(jax.random.key(0), TOKENS[:1, :2])


def drawn(monkeypatch, module, *, key=KEY, rows=slice(None), train=True):
    """Give the masks that a call draws, in the order of the model."""
    found = []

    def record(x, kept, rate):
        found.append((np.asarray(kept), rate))
        return x

    monkeypatch.setattr(dropout, "dropped", record)
    values = variables(scan_layers=False)
    module.clone(scan_layers=False).apply(values, TOKENS[rows], train=train, rngs={"dropout": key})
    return found


def test_embeddings_and_each_part_of_each_block_have_masks_of_their_own(monkeypatch):
    found = drawn(monkeypatch, decoder())
    assert [rate for _, rate in found] == [0.1, *(0.3, 0.2, 0.2) * 3], "probabilities, mixer and mlp of each block"
    for mask, rate in found:
        assert mask.shape == ((4, 2, 2, 17, 17) if rate == 0.3 else (4, 17, 32))
        assert abs(np.mean(mask) - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / mask.size)
    for (one, rate), (other, same) in itertools.combinations(found, 2):
        if rate == same:
            assert abs(np.mean(one == other) - (1 - 2 * rate * (1 - rate))) < 0.05


def test_a_rate_alone_drops_what_it_is_of(monkeypatch):
    assert len(drawn(monkeypatch, decoder(dropout_rate=0.0))) == 4
    assert len(drawn(monkeypatch, decoder(embedding_dropout_rate=0.0))) == 9
    assert len(drawn(monkeypatch, decoder(attention_dropout_rate=0.0))) == 7


def test_a_key_gives_its_masks_and_no_others(monkeypatch):
    first, again, other = (drawn(monkeypatch, decoder(), key=key) for key in (KEY, KEY, jax.random.key(4)))
    for one, same, differs in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(one[0], same[0])
        assert np.mean(one[0] != differs[0]) > 0.1


def trained(module, values, key=KEY):
    """Give the loss and the gradients of a training call."""

    def loss(params):
        logits = module.apply({"params": params}, TOKENS, train=True, rngs={"dropout": key})
        return -jnp.mean(jax.nn.log_softmax(logits)[:, :-1] * jax.nn.one_hot(TOKENS[:, 1:], 64))

    loss, gradients = jax.jit(jax.value_and_grad(loss))(values["params"])
    return loss, module.stack_view().unstack(gradients)


@pytest.mark.parametrize("remat", [None, "full"])
@pytest.mark.parametrize("storage", [{"scan_layers": False}, {"bank_layers": 2}], ids=str)
def test_storage_and_recomputation_change_no_mask(storage, remat):
    want = trained(decoder(), variables())
    got = trained(decoder(remat=remat, **storage), variables(**storage))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7), got, want)
    assert trained(decoder(), variables(), jax.random.key(4))[0] != want[0]


def test_a_pattern_of_layers_has_the_masks_of_its_layers():
    layers = (tiny_layer(window=4), tiny_layer()) * 2
    fields = {"layers": layers, "num_layers": 4}
    values = decoder(**fields).init(jax.random.key(0), TOKENS[:1, :2])
    apart = decoder(**fields, scan_layers=False)
    want = trained(apart, apart.init(jax.random.key(0), TOKENS[:1, :2]))
    np.testing.assert_allclose(trained(decoder(**fields), values)[0], want[0], rtol=1e-6)


def test_evaluation_and_generation_draw_nothing():
    plain, module = tiny_decoder(), tiny_decoder(**RATES)
    values = plain.init(jax.random.key(0), TOKENS[:1, :2])
    np.testing.assert_array_equal(module.apply(values, TOKENS), plain.apply(values, TOKENS))
    rngs = {"dropout": KEY}
    np.testing.assert_array_equal(module.apply(values, TOKENS, rngs=rngs), plain.apply(values, TOKENS))
    cache = module.init_cache(4, 32)
    np.testing.assert_array_equal(
        module.apply(values, TOKENS, cache=cache, train=True)[0], plain.apply(values, TOKENS, cache=cache)[0]
    )
    batch = LanguageModel(plain).prepare(tiny_batch())
    got, want = (LanguageModel(each).loss(values, batch, key=KEY, train=False) for each in (module, plain))
    assert got.loss.total == want.loss.total


@pytest.mark.parametrize("experts", [False, True])
def test_training_without_rates_is_the_program_without_dropout(experts):
    layer = tiny_layer()
    if experts:
        layer = dataclasses.replace(layer, mlp=ExpertsSpec(num_experts=4, features=16, router=RouterSpec(top_k=2)))
    plain = tiny_decoder(layers=(layer,) * 2)
    values = plain.init(jax.random.key(0), TOKENS[:1, :2])
    batch = LanguageModel(plain).prepare(tiny_batch())

    def program(module, *, train):
        run = lambda values, key: LanguageModel(module).loss(values, batch, key=key, train=train).loss.total  # noqa: E731
        return str(jax.make_jaxpr(run)(values, KEY))

    assert program(plain, train=True) == program(plain, train=False)
    dropping = tiny_decoder(layers=(layer,) * 2, **RATES)
    assert program(dropping, train=False) == program(plain, train=False)
    assert program(dropping, train=True).count("threefry2x32") > 4


def test_training_with_rates_and_no_key_is_refused():
    with pytest.raises(ValueError, match=r"needs a random key: pass rngs=.*residual_rate': 0.2"):
        decoder().apply(variables(), TOKENS, train=True)


@pytest.mark.parametrize("name", RATES)
def test_rates_that_are_none_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name} must be from 0 up to 1. Received: {name}=1"):
        tiny_decoder(**{name: 1})


def test_probabilities_are_dropped_where_there_are_some():
    scan = Mamba2Spec(num_heads=4, head_dim=8, num_groups=1, state_size=8, conv_kernel=2, norm_eps=1e-5)
    scanning = dataclasses.replace(tiny_layer(), mixer=scan)
    with pytest.raises(ValueError, match=r"no layer has attention probabilities .* attention_dropout_rate=0.1"):
        tiny_decoder(layers=(scanning,) * 2, attention_dropout_rate=0.1)
    assert tiny_decoder(layers=(scanning, tiny_layer()), attention_dropout_rate=0.1, dropout_rate=0.1)


def test_evaluation_drops_nothing_where_training_scores_inside_the_schedule():
    module = decoder(num_layers=2, schedule="1f1b")
    values = variables(num_layers=2)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def total(module, train):
        objective = LanguageModel(module)
        return objective.loss(values, objective.prepare(tiny_batch(rows=8)), key=KEY, train=train).loss.total

    with jax.set_mesh(build_mesh(MeshSpec(stage=2))):
        assert module.scores_in_schedule
        still = total(module.clone(**dict.fromkeys(RATES, 0.0)), train=False)
        np.testing.assert_allclose(total(module, train=False), still, rtol=1e-6)
        assert abs(total(module, train=True) - still) > 0.01


def test_a_kernel_that_drops_no_probabilities_is_refused_in_training(monkeypatch):
    hopper = attention_choice.Accelerator(platform="cuda", capability=(9, 0), cudnn=91000)
    monkeypatch.setattr(attention_choice, "accelerator", lambda mesh=None: hopper)
    module = decoder(attention_impl="cudnn", dtype="bfloat16")
    with pytest.raises(ValueError, match="'cudnn' cannot run this call: it has no dropout of probabilities"):
        module.apply(variables(), TOKENS, train=True, rngs={"dropout": KEY})
    (line,) = attention_report(decoder(dtype="bfloat16"), num_tokens=16, packed=False, device=hopper)
    assert "xla (not cudnn: it has no dropout of probabilities" in line
