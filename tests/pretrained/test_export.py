"""An exported model loads to the same weights and, in the reference library, the same logits; or nothing is written."""

import dataclasses
import gc
import json
import tracemalloc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dew.nn.embed import EmbeddingSpec, HeadSpec
from dew.nn.moe import ExpertsSpec
from dew.nn.rope import RotarySpec
from dew.nn.router import RouterSpec, RouterTraining
from dew.nn.sharding import unboxed
from dew.placement.layout import Layout
from dew.placement.mesh import MeshSpec, build_mesh
from dew.pretrained import describe, load_pretrained, save_pretrained
from dew.pretrained import export as exporting
from dew.pretrained.families import FAMILIES
from dew.pretrained.families.decoder import with_attention
from dew.pretrained.recipe import Weight
from dew.pretrained.safetensors import open_safetensors
from tests.pretrained.checkpoints import FIXTURES, NAMES, everything_in, read_header
from tests.tiny import tiny_decoder, tiny_layer

SPLIT = Layout(min_shard=1, tolerance=0.5)
SLACK = 4_000_000
"""Bytes of what Python makes beside the arrays, as it traces the model."""


def same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def drawn(module):
    """Weights of a model, drawn without its initializers, which would be compiled."""
    abstract = unboxed(jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    generator = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(generator.standard_normal(leaf.shape), leaf.dtype), abstract)


@pytest.mark.parametrize(
    "name, storage", [*((name, {}) for name in NAMES), ("llama", {"scan_layers": False}), ("qwen3", {"bank_layers": 2})]
)
def test_tensors_come_back_bit_for_bit(name, storage, tmp_path, tensors):
    loaded = load_pretrained(FIXTURES / name, mesh={"fsdp": 4, "tensor": 2}, layout=SPLIT, **storage)
    save_pretrained(tmp_path / "out", loaded.module, loaded.variables, loaded.config)
    want, got = tensors(FIXTURES / name), tensors(tmp_path / "out")
    assert got.keys() == want.keys()
    for tensor in want:
        np.testing.assert_array_equal(got[tensor], want[tensor])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    original = json.loads((FIXTURES / name / "config.json").read_text())
    assert {**original, **config} == {**config, "transformers_version": original["transformers_version"]}
    again = load_pretrained(tmp_path / "out", mesh={"fsdp": 2}, layout=SPLIT)
    assert again.module == describe(FIXTURES / name).module


def test_a_model_from_scratch_is_written_and_read(tmp_path):
    module = tiny_decoder(tie_embeddings=False)
    variables = drawn(module)
    save_pretrained(tmp_path / "out", module, variables)
    loaded = load_pretrained(tmp_path / "out")
    same(loaded.variables, variables)
    assert loaded.module == module


def test_large_models_are_split_with_the_index_last(tmp_path, monkeypatch):
    loaded = load_pretrained(FIXTURES / "llama")
    order = []
    write_json, write_shard = exporting._write_json, exporting._write_shard
    monkeypatch.setattr(
        exporting, "_write_json", lambda path, value: (order.append(path.name), write_json(path, value))
    )
    monkeypatch.setattr(
        exporting,
        "_write_shard",
        lambda file, *rest: (order.append(file.name.split("/")[-1]), write_shard(file, *rest)),
    )
    save_pretrained(tmp_path / "out", loaded.module, loaded.variables, max_shard_bytes=60_000)
    assert order[-1] == "model.safetensors.index.json"
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(path.stat().st_size < 62_000 for path in shards)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == open_safetensors(tmp_path / "out").nbytes
    same(load_pretrained(tmp_path / "out").variables, loaded.variables)


@pytest.mark.parametrize("storage", [{}, {"scan_layers": False}], ids=str)
def test_a_save_holds_one_leaf_on_the_host_and_none_when_it_is_done(tmp_path, storage):
    module = tiny_decoder(num_layers=8, features=2048, **storage)
    variables = drawn(module)
    abstract = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    shardings = SPLIT.shardings(build_mesh(MeshSpec(fsdp=8)), abstract)
    variables = jax.device_put(variables, shardings)
    save_pretrained(tmp_path / "first", module, variables)  # compiles
    variables = jax.device_put(jax.device_get(variables), shardings)
    layers = [leaf[0] if leaf.shape[0] == 8 and not storage else leaf for leaf in jax.tree.leaves(variables)]
    largest, total = max(leaf.nbytes for leaf in layers), sum(leaf.nbytes for leaf in jax.tree.leaves(variables))
    gc.collect()
    tracemalloc.start()
    save_pretrained(tmp_path / "second", module, variables)
    gc.collect()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < largest + SLACK < total / 2
    assert held < SLACK


@pytest.mark.parametrize("dtype, want", [("bfloat16", "bfloat16"), (None, "float32"), (jnp.float16, "float16")])
def test_the_dtype_is_that_of_the_checkpoint_unless_told(dtype, want, tmp_path):
    loaded = load_pretrained(FIXTURES / "llama", dtype="bfloat16" if dtype is None else None)
    save_pretrained(tmp_path / "out", loaded.module, loaded.variables, loaded.config, dtype=dtype)
    source = open_safetensors(tmp_path / "out")
    assert {source.info(name).dtype.name for name in source.names()} == {want}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == want


def test_an_earlier_export_is_replaced_whole(tmp_path):
    first, second = load_pretrained(FIXTURES / "llama"), load_pretrained(FIXTURES / "qwen3_untied")
    save_pretrained(tmp_path / "out", first.module, first.variables, max_shard_bytes=60_000)
    save_pretrained(tmp_path / "out", second.module, second.variables)
    same(load_pretrained(tmp_path / "out").variables, second.variables)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_of_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    before = everything_in(tmp_path)
    loaded = load_pretrained(FIXTURES / "llama")
    with pytest.raises(FileExistsError, match=r"no export wrote, such as 'thesis\.tex'"):
        save_pretrained(tmp_path, loaded.module, loaded.variables)
    assert everything_in(tmp_path) == before


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    loaded = load_pretrained(FIXTURES / "llama")
    save_pretrained(tmp_path / "out", loaded.module, loaded.variables)
    before = everything_in(tmp_path)

    def full(file, tensors, arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "_write_shard", full)
    for target in ("out", "new"):
        with pytest.raises(OSError, match="No space left"):
            save_pretrained(tmp_path / target, loaded.module, loaded.variables)
    assert everything_in(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def other_layers(**attention):
    return (tiny_layer(), tiny_layer(**attention), tiny_layer(), tiny_layer())


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"layers": other_layers(head_dim=16)}, "the config states head_dim once for all layers"),
        ({"layers": other_layers(scale=0.3)}, "its config cannot express this model's layers"),
        ({"layers": (tiny_layer(rotary=None),)}, "every layer needs rotary positions"),
        ({"layers": (tiny_layer(out_bias=True, rotary=RotarySpec(theta=1e4, fraction=0.5)),)}, "rotates whole heads"),
        ({"layers": (tiny_layer(out_bias=True),)}, "cannot express this model's layers"),
        ({"layers": (tiny_layer(window=3), tiny_layer(window=5))}, r"one sliding_window. Received: \[3, 5\]"),
        ({"head": HeadSpec(scale=3.0)}, "cannot express this model's head"),
        ({"embedding": EmbeddingSpec(scale=2.0)}, "cannot express this model's embedding"),
        ({"norm": dataclasses.replace(tiny_decoder().norm, eps=1e-3)}, "cannot express this model's norm"),
    ],
)
def test_what_no_config_expresses_is_refused_and_nothing_is_written(tmp_path, fields, text):
    module = tiny_decoder(**fields)
    with pytest.raises(ValueError, match=text):
        save_pretrained(tmp_path / "out", module, {})
    assert list(tmp_path.iterdir()) == []


def test_training_that_a_config_cannot_state_is_named_and_the_weights_are_written(tmp_path, tensors):
    loaded = load_pretrained(FIXTURES / "mixtral")
    balanced = loaded.module.clone(router_training=RouterTraining(balance_loss=0.04))
    save_pretrained(tmp_path / "balanced", balanced, loaded.variables, loaded.config)
    assert load_pretrained(tmp_path / "balanced").module == balanced
    module = balanced.clone(router_training=RouterTraining(balance_loss=0.04, z_loss=0.001), dropout_rate=0.1)
    with pytest.warns(
        UserWarning, match=r"of mixtral has no place for z_loss=0\.001 of router_training, dropout_rate=0\.1\. What"
    ) as said:
        save_pretrained(tmp_path / "out", module, loaded.variables, loaded.config)
    assert len(said) == 1
    assert load_pretrained(tmp_path / "out").module == balanced
    same(tensors(tmp_path / "out"), tensors(FIXTURES / "mixtral"))


def without_windows(module):
    return module.clone(layers=tuple(with_attention(layer, window=None) for layer in module.layers))


def with_experts(top_k=None, **changed):
    def edit(module):
        def other(layer):
            if not isinstance(layer.mlp, ExpertsSpec):
                return layer
            router = dataclasses.replace(layer.mlp.router, top_k=top_k or layer.mlp.router.top_k)
            return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, router=router, **changed))

        return module.clone(layers=tuple(map(other, module.layers)))

    return edit


def stretched(module):
    def other(layer):
        rotary = layer.attention.rotary
        scaling = dataclasses.replace(rotary.scaling, original_max_length=2 * rotary.scaling.original_max_length)
        return with_attention(layer, rotary=dataclasses.replace(rotary, scaling=scaling))

    return module.clone(layers=tuple(map(other, module.layers)))


def one_layer_less(module):
    return module.clone(layers=module.layers[:-1])


@pytest.mark.parametrize(
    "name, stated, edit, left_out",
    [
        ("qwen2_moe", {}, without_windows, "layer_types"),
        ("qwen2_moe", {}, lambda module: one_layer_less(without_windows(module)), "layer_types"),
        ("gpt_oss", {"experts_per_token": 2}, with_experts(top_k=1), "experts_per_token"),
        ("gpt_oss", {"initial_context_length": "original"}, stretched, "initial_context_length"),
        ("qwen3_moe", {"num_experts": "num_local_experts"}, with_experts(num_experts=8), "num_experts"),
        ("llama", {"layer_types": ["full_attention"] * 3}, one_layer_less, "layer_types"),
    ],
)
def test_what_a_config_said_of_another_model_is_left_out_and_named(copied, tmp_path, name, stated, edit, left_out):
    source = load_pretrained(copied(name))
    scaling = getattr(source.module.layers[0].attention.rotary.scaling, "original_max_length", None)
    values = {"original": scaling, "num_local_experts": source.config.get("num_local_experts")}
    stated = {field: values.get(value, value) if isinstance(value, str) else value for field, value in stated.items()}
    config = source.config | stated
    save_pretrained(tmp_path / "out", source.module, source.variables, config)
    assert load_pretrained(tmp_path / "out").config.items() >= stated.items()  # which hold for this model
    module = edit(source.module)
    variables = drawn(module)
    with pytest.warns(UserWarning, match=rf"is left out of config\.json: {left_out}="):
        save_pretrained(tmp_path / "out", module, variables, config)
    again = load_pretrained(tmp_path / "out")
    assert (again.module.layers, left_out in again.config) == (module.layers, False)
    same(again.variables, variables)


def test_a_tokenizer_of_another_model_is_refused_and_nothing_is_written(tmp_path):
    loaded = load_pretrained(FIXTURES / "llama")
    larger = types.SimpleNamespace(vocab_size=loaded.module.vocab_size + 1)
    with pytest.raises(ValueError, match=r"The tokenizer has 97 tokens, the model 96: what is written would not load"):
        save_pretrained(tmp_path / "out", loaded.module, loaded.variables, loaded.config, larger)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def balanced_family(monkeypatch):
    """A family like Mixtral whose routers have balance biases, and a model of it in bfloat16."""
    mixtral = FAMILIES["mixtral"]
    experts = ExpertsSpec(num_experts=4, features=16, router=RouterSpec(top_k=2, balance_bias=True))
    layers = (dataclasses.replace(tiny_layer(), mlp=experts),) * 2
    names = ("vocab_size", "features", "layers", "norm", "max_length")
    module = tiny_decoder(layers=layers, dtype="bfloat16", param_dtype="bfloat16")
    bias = Weight("params/layers_{i}/mlp/router/balance_bias", "model.layers.{i}.balance", "E -> E")
    family = dataclasses.replace(
        mixtral,
        model_type="balanced",
        translate=lambda fields: {name: getattr(module, name) for name in names},
        config_dict=lambda module: {},
        weights=(bias, *mixtral.weights),
    )
    monkeypatch.setitem(FAMILIES, "balanced", family)
    return module


@pytest.mark.parametrize("narrowed", [False, True])
def test_balance_biases_stay_float32_in_the_file_and_in_a_model_of_bfloat16(balanced_family, narrowed, tmp_path):
    variables = drawn(balanced_family)
    router = variables["params"]["layers_0_1"]["mlp"]["router"]
    assert (router["kernel"].dtype, router["balance_bias"].dtype) == (jnp.bfloat16, jnp.float32)
    router["balance_bias"] = 4.0 + 0.001 * jnp.arange(8.0).reshape(2, 4)
    config = {"model_type": "balanced", "dtype": "bfloat16"}
    save_pretrained(tmp_path, balanced_family, variables, config)
    if narrowed:  # what another writer may have left
        tensors = load_file(tmp_path / "model.safetensors")
        save_file({name: t.astype(jnp.bfloat16) for name, t in tensors.items()}, tmp_path / "model.safetensors")
    else:
        header, _ = read_header(tmp_path / "model.safetensors")
        wide = {name for name, tensor in header.items() if tensor.get("dtype") == "F32"}
        assert wide == {"model.layers.0.balance", "model.layers.1.balance"}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    for param_dtype in (None, "bfloat16"):
        router_again = load_pretrained(tmp_path, param_dtype=param_dtype).variables["params"]["layers_0_1"]["mlp"][
            "router"
        ]
        assert router_again["kernel"].dtype == jnp.bfloat16
        assert router_again["balance_bias"].dtype == jnp.float32
        if not narrowed:
            np.testing.assert_array_equal(router_again["balance_bias"], router["balance_bias"])


def test_a_config_of_another_family_is_refused(tmp_path):
    loaded = load_pretrained(FIXTURES / "qwen3")
    with pytest.raises(ValueError, match="a Llama config cannot express norms of queries and keys"):
        save_pretrained(tmp_path / "out", loaded.module, loaded.variables, {"model_type": "llama"})
    with pytest.raises(ValueError, match="model_type='bert' is not one of llama, qwen3"):
        save_pretrained(tmp_path / "out", loaded.module, loaded.variables, {"model_type": "bert"})
    assert list(tmp_path.iterdir()) == []


def test_variables_of_another_model_are_refused(tmp_path):
    loaded, other = load_pretrained(FIXTURES / "llama"), load_pretrained(FIXTURES / "qwen3_untied")
    with pytest.raises(ValueError, match=r"The variables are not those of the model: .* such as"):
        save_pretrained(tmp_path / "out", loaded.module, other.variables)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.reference
@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_the_same_logits_from_an_export(name, tmp_path, reference):
    import torch
    from transformers import AutoModelForCausalLM

    loaded = load_pretrained(FIXTURES / name, mesh={"fsdp": 2, "tensor": 2}, layout=SPLIT)
    # Other weights than the fixture's, so that a file left behind would not pass.
    changed = jax.tree.map(lambda leaf: leaf * 1.01, loaded.variables)
    save_pretrained(tmp_path / "out", loaded.module, changed, loaded.config, max_shard_bytes=50_000)
    tokens = reference(name)["tokens"]
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        want = model(torch.tensor(tokens)).logits.numpy()
    with jax.set_mesh(loaded.mesh):
        got = np.asarray(jax.jit(loaded.module.apply)(changed, tokens))
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
