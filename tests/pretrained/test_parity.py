"""A loaded checkpoint computes what the reference library computes, and the tolerance would show a wrong field."""

import dataclasses

import jax
import numpy as np
import pytest

from dew.placement.layout import Layout
from dew.pretrained import load_pretrained
from tests.pretrained.checkpoints import FIXTURES, NAMES

TOLERANCE = 1e-5  # of the largest logit


def logits(module, variables, tokens):
    return np.asarray(jax.jit(module.apply)(variables, tokens))


def difference(got, want):
    return np.abs(got - want).max() / np.abs(want).max()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_reference(name, reference):
    want = reference(name)
    loaded = load_pretrained(FIXTURES / name)
    assert difference(logits(loaded.module, loaded.variables, want["tokens"]), want["logits"]) <= TOLERANCE
    assert want["entropy"] < 0.5, "the fixture's attention must be peaked, or the comparison sees little of it"


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 2, "tensor": 2}, {"tensor": 2}])
@pytest.mark.parametrize("name", ["llama_untied", "qwen3"])
def test_logits_are_the_same_on_every_mesh(name, mesh, reference):
    want = reference(name)
    loaded = load_pretrained(FIXTURES / name, mesh=mesh, layout=Layout(min_shard=1, tolerance=0.1))
    with jax.set_mesh(loaded.mesh):
        got = logits(loaded.module, loaded.variables, want["tokens"])
    assert difference(got, want["logits"]) <= TOLERANCE


@pytest.mark.parametrize("storage", [{"scan_layers": False}, {"bank_layers": 2}])
def test_logits_do_not_depend_on_storage(storage, reference):
    want = reference("qwen3_untied")
    loaded = load_pretrained(FIXTURES / "qwen3_untied", **storage)
    assert difference(logits(loaded.module, loaded.variables, want["tokens"]), want["logits"]) <= TOLERANCE


def with_attention(module, **fields):
    """The model with other attention fields in every layer."""
    layers = tuple(
        dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, **fields)) for layer in module.layers
    )
    return module.clone(layers=layers)


def theta_times_ten(module, variables):
    rotary = module.layers[0].attention.rotary
    return with_attention(module, rotary=dataclasses.replace(rotary, theta=10 * rotary.theta)), variables


def unscaled_rotary(module, variables):
    rotary = module.layers[0].attention.rotary
    return with_attention(module, rotary=dataclasses.replace(rotary, scaling=None)), variables


def eps_times_ten(module, variables):
    norm = dataclasses.replace(module.norm, eps=10 * module.norm.eps)
    layers = tuple(dataclasses.replace(layer, norm=norm) for layer in module.layers)
    return module.clone(layers=layers, norm=norm), variables


def norms_swapped(module, variables):
    params = dict(variables["params"])
    bank = dict(params["layers_0_2"])
    names = ("input_layernorm", "post_attention_layernorm")
    bank[names[0]], bank[names[1]] = bank[names[1]], bank[names[0]]
    return module, {"params": {**params, "layers_0_2": bank}}


def head_norms_swapped(module, variables):
    params = dict(variables["params"])
    attention = dict(params["layers_0_2"]["self_attn"])
    attention["q_norm"], attention["k_norm"] = attention["k_norm"], attention["q_norm"]
    return module, {"params": {**params, "layers_0_2": {**params["layers_0_2"], "self_attn": attention}}}


def scaled_by_the_width(module, variables):
    spec = module.layers[0].attention
    return with_attention(module, scale=(module.features / spec.num_kv_heads) ** -0.5), variables


def tied_to_the_table(module, variables):
    return module.clone(tie_embeddings=True), variables


EVERYWHERE = [theta_times_ten, eps_times_ten, norms_swapped, scaled_by_the_width]


@pytest.mark.parametrize(
    "name, mutate",
    [(name, mutate) for name in NAMES for mutate in EVERYWHERE]
    + [(name, tied_to_the_table) for name in ("llama_untied", "qwen3_untied")]
    + [(name, unscaled_rotary) for name in ("llama_untied", "qwen3_untied")]
    + [("qwen3", head_norms_swapped)],
)
def test_a_wrong_field_exceeds_the_tolerance_a_hundredfold(name, mutate, reference):
    want = reference(name)
    loaded = load_pretrained(FIXTURES / name)
    module, variables = mutate(loaded.module, loaded.variables)
    assert difference(logits(module, variables, want["tokens"]), want["logits"]) > 100 * TOLERANCE
