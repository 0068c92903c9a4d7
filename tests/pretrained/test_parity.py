"""A loaded checkpoint computes what the reference library computes, and the tolerance would show a wrong field."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.nn.embed import scaled_rows
from dew.nn.latent_attention import attention_form
from dew.nn.norm import Norm
from dew.placement.layout import Layout
from dew.placement.stacks import stack_view
from dew.pretrained import load_pretrained
from tests.pretrained.checkpoints import FIXTURES, NAMES
from tests.pretrained.mutation_table import wrong_fields
from tests.pretrained.mutations import with_layers

TOLERANCE = 1e-5  # of the largest logit
PROMPT = 20


@functools.cache
def loaded(name):
    return load_pretrained(FIXTURES / name)


@functools.cache
def compiled(module):
    return jax.jit(module.apply)


def logits(module, variables, tokens):
    return np.asarray(compiled(module)(variables, tokens))


def decoded(module, variables, tokens):
    """Logits of a prompt, and of every token after it alone, from the cache."""

    @jax.jit
    def decode(variables, tokens):
        def step(cache, token):
            logits, cache = module.apply(variables, token[:, None], cache=cache)
            return cache, logits[:, 0]

        cache = module.init_cache(len(tokens), tokens.shape[1])
        first, cache = module.apply(variables, tokens[:, :PROMPT], cache=cache)
        _, rest = jax.lax.scan(step, cache, tokens[:, PROMPT:].T)
        return jnp.concatenate([first, rest.swapaxes(0, 1)], axis=1)

    return np.asarray(decode(variables, jnp.asarray(tokens)))


def difference(got, want):
    return np.abs(got - want).max() / np.abs(want).max()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_reference(name, reference):
    want = reference(name)
    model = loaded(name)
    assert difference(logits(model.module, model.variables, want["tokens"]), want["logits"]) <= TOLERANCE
    if any(attention_form(layer.mixer) for layer in model.module.layers):
        assert want["entropy"] < 0.5, "the fixture's attention must be peaked, or the comparison sees little of it"
    if not all(attention_form(layer.mixer) for layer in model.module.layers):
        assert want["memory"] > 0.02, "the last tokens must depend on the first ones, or states are hardly compared"


@pytest.mark.parametrize("name", NAMES)
def test_cached_decoding_gives_the_logits_of_the_reference(name, reference):
    want, model = reference(name), loaded(name)
    assert difference(decoded(model.module, model.variables, want["tokens"]), want["logits"]) <= TOLERANCE


MESHES = [{"fsdp": 8}, {"fsdp": 2, "tensor": 2}, {"tensor": 2}]
MESHED = (
    [(name, mesh) for name in ("llama_untied", "qwen3") for mesh in MESHES]
    + [(name, MESHES[1]) for name in ("gemma2", "gemma3_text")]
    + [("mixtral", {"expert": 2, "fsdp": 2, "tensor": 2}), ("qwen2_moe", {"expert": 2, "fsdp": 2, "sequence": 2})]
    + [("gpt_oss", {"expert": 2, "fsdp": 2, "sequence": 2})]
    + [("deepseek_v2", {"expert": 2, "fsdp": 2, "tensor": 2}), ("deepseek_v3", {"sequence": 4, "tensor": 2})]
    + [("qwen3_next", {"expert": 2, "sequence": 2, "tensor": 2}), ("qwen3_5_text", {"sequence": 2, "tensor": 2})]
    + [("qwen3_5_moe_text", {"expert": 2, "fsdp": 2, "sequence": 2})]
)


@pytest.mark.parametrize("name, mesh", MESHED)
def test_logits_are_the_same_on_every_mesh(name, mesh, reference):
    want = reference(name)
    model = load_pretrained(FIXTURES / name, mesh=mesh, layout=Layout(min_shard=1, tolerance=0.1))
    with jax.set_mesh(model.mesh):
        got = logits(model.module, model.variables, want["tokens"])
    assert difference(got, want["logits"]) <= TOLERANCE


@pytest.mark.parametrize("storage", [{"scan_layers": False}, {"bank_layers": 2}])
def test_logits_do_not_depend_on_storage(storage, reference):
    want = reference("qwen3_untied")
    model = load_pretrained(FIXTURES / "qwen3_untied", **storage)
    assert difference(logits(model.module, model.variables, want["tokens"]), want["logits"]) <= TOLERANCE


@pytest.mark.parametrize(
    "name", [name for name in NAMES if "bfloat16_normed" in np.load(FIXTURES / name / "reference.npz")]
)
def test_embeddings_and_norms_round_where_the_reference_rounds(name, reference):
    want = {key: value.view(jnp.bfloat16) for key, value in reference(name).items() if key.startswith("bfloat16")}
    model = loaded(name)
    params = stack_view(model.module).unstack(model.variables)["params"]
    rows = params["embed_tokens"]["embedding"].astype(jnp.bfloat16)[reference(name)["tokens"][:1, :16]]
    embedded = scaled_rows(rows, model.module.embedding)[0]
    if model.module.embedding.positions is not None:
        embedded = embedded + params["embed_positions"]["embedding"].astype(jnp.bfloat16)[:16]
    np.testing.assert_array_equal(np.asarray(embedded), want["bfloat16_embedded"])
    spec, layer = model.module.layers[0].norm, params["layers_0"]
    weights = layer.get("input_layernorm") or layer["post_attention_layernorm"]
    read = want.get("bfloat16_read", want["bfloat16_embedded"])

    def agreement(spec):
        weights_bfloat16 = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
        got = Norm(model.module.features, spec).apply({"params": weights_bfloat16}, jnp.asarray(read))
        return (np.asarray(got) == want["bfloat16_normed"]).mean()

    # The reciprocal root may differ in its last float32 bit, which seldom moves a rounding to bfloat16.
    assert agreement(spec) > 0.99
    other = {"before_scale": "after_scale", "after_scale": "before_scale"}[spec.cast]
    assert agreement(dataclasses.replace(spec, cast=other)) < 0.97
    if model.module.embedding.round_scale:
        unrounded = scaled_rows(rows, dataclasses.replace(model.module.embedding, round_scale=False))[0]
        assert (np.asarray(unrounded) != np.asarray(embedded)).mean() > 0.005


@pytest.mark.parametrize("name, mutate", [(name, mutate) for name in NAMES for mutate in wrong_fields(name)])
def test_a_wrong_field_exceeds_the_tolerance_a_hundredfold(name, mutate, reference):
    want, model = reference(name), loaded(name)
    module, variables = mutate(model.module, model.variables)
    assert difference(logits(module, variables, want["tokens"]), want["logits"]) > 100 * TOLERANCE


@pytest.mark.parametrize("name, other", [("gpt_neox", "gelu_tanh"), ("gpt2", "gelu"), ("starcoder2", "gelu")])
def test_the_other_form_of_gelu_exceeds_the_tolerance_fivefold(name, other, reference):
    want, model = reference(name), loaded(name)

    def changed(layer):
        return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, activation=other))

    got = logits(with_layers(model.module, changed), model.variables, want["tokens"])
    assert difference(got, want["logits"]) > 5 * TOLERANCE
