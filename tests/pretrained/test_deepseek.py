"""DeepSeek configs field by field, the rule of the balance bias, float8 blocks."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.nn import expert_dispatch
from dew.nn.latent_attention import LatentAttentionSpec
from dew.nn.router import Choice, RouterSpec, choose
from dew.placement.layout import Layout
from dew.pretrained import CheckpointError, describe, load_pretrained, save_pretrained
from dew.pretrained.export import export_config
from dew.pretrained.families import FAMILIES
from dew.pretrained.families.fields import Fields
from tests.pretrained import gguf_files
from tests.pretrained.checkpoints import FIXTURES, read_header, safetensors_bytes

PUBLISHED_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def translated(name, **fields):
    config = json.loads((FIXTURES / name / "config.json").read_text()) | fields
    config = {key: value for key, value in config.items() if value != "absent"}
    return FAMILIES[config["model_type"]].translate(Fields(config, "here"))


def test_the_published_config_reads_as_the_published_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_V3))
    described = describe(tmp_path)
    module = described.module
    assert "quantization_config" not in described.config
    first, last = module.layers[2], module.layers[-1]
    assert (first.mlp.features, last.mlp.features, last.mlp.shared.features) == (18432, 2048, 2048)
    spec = last.mixer
    assert isinstance(spec, LatentAttentionSpec)
    assert (spec.num_heads, spec.qk_head_dim, spec.v_head_dim, spec.q_lora_rank) == (128, 192, 128, 1536)
    assert spec.logit_scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert (spec.norm.eps, spec.rotary.interleaved) == (1e-6, True)
    assert last.mlp.router == RouterSpec(
        top_k=8,
        score="sigmoid",
        normalise=True,
        scale=2.5,
        groups=8,
        top_groups=4,
        group_score="top2",
        balance_bias=True,
    )
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    further = shapes["params"].pop("prediction_0")
    billions = [sum(leaf.size for leaf in jax.tree.leaves(part)) / 1e9 for part in (shapes, further)]
    # A layer that predicts further tokens is published as 14 billion with its copies of the table and the head.
    assert [round(each, 1) for each in billions] == [671.0, 11.6]
    # What a token takes of the cache: 576 numbers a layer, where keys and values of 128 heads would be 40,960.
    cache = jax.eval_shape(lambda: module.init_cache(1, 1))
    assert sum(bank.latents.size for bank in cache.banks) == 61 * 576


def test_absent_fields_and_null_mean_what_the_classes_make_of_them():
    absent = dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor"), "absent")
    router = translated("deepseek_v3", **absent, n_routed_experts=16)["layers"][-1].mlp.router
    assert (router.groups, router.top_groups, router.scale) == (8, 4, 2.5)
    for name, value in (("norm_topk_prob", True), ("rope_interleave", True)):
        for stated, want in (("absent", value), (None, False), (False, False)):
            layer = translated("deepseek_v3", **{name: stated})["layers"][-1]
            got = layer.mlp.router.normalise if name == "norm_topk_prob" else layer.mixer.rotary.interleaved
            assert got is want
    layers = translated("deepseek_v3", first_k_dense_replace="absent", q_lora_rank="absent")["layers"]
    assert [hasattr(layer.mlp, "router") for layer in layers] == [False] * 3
    assert layers[0].mixer.q_lora_rank == 1536
    layers = translated("deepseek_v2", first_k_dense_replace="absent", q_lora_rank=None)["layers"]
    assert [hasattr(layer.mlp, "router") for layer in layers] == [True] * 3
    assert layers[0].mixer.q_lora_rank is None
    layer = translated("deepseek_v2", n_shared_experts="absent", topk_method="absent")["layers"][-1]
    assert (layer.mlp.shared.features, layer.mlp.router.groups) == (2 * 6, 1)


@pytest.mark.parametrize(
    "name, fields, text",
    [
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 4: every head has keys of its own"),
        ("deepseek_v3", {"head_dim": 8}, "head_dim is 4.* Received: head_dim=8"),
        ("deepseek_v2", {"qk_head_dim": 12}, "qk_head_dim is 10"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "not supported: moe_layer_freq=2"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "not supported: scoring_func=softmax"),
        ("deepseek_v3", {"topk_method": "greedy"}, "not supported: topk_method=greedy"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported; known: greedy"),
        ("deepseek_v2", {"norm_topk_prob": True}, "not supported: norm_topk_prob=True"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "not supported: scoring_func=sigmoid"),
        ("deepseek_v3", {"n_group": 3}, "3 groups do not divide 8 experts"),
        ("deepseek_v3", {"topk_group": 3}, "top_groups must lie in 1..groups"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 8}, "groups of two or more experts"),
        ("deepseek_v3", {"qk_rope_head_dim": 3, "head_dim": 3, "qk_head_dim": 11}, "even width"),
        ("deepseek_v3", {"num_nextn_predict_layers": 5000}, "num_nextn_predict_layers=5000; at most 16"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts must be a positive whole number"),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}},
            r"float8 weights those with a scale for each block.* Received: weight_block_size=None",
        ),
        (
            "deepseek_v3",
            {"quantization_config": PUBLISHED_V3["quantization_config"] | {"activation_scheme": "static"}},
            r"Received: weight_block_size=\[128, 128\], activation_scheme=static",
        ),
        ("deepseek_v3", {"quantization_config": {"quant_method": "awq"}}, "not supported: quantization_config="),
    ],
    ids=str,
)
def test_a_field_that_is_not_understood_is_refused_by_name(copied, name, fields, text):
    with pytest.raises(CheckpointError, match=text):
        describe(copied(name, **fields))


def test_what_the_configs_cannot_say_is_refused():
    module = describe(FIXTURES / "deepseek_v3").module
    first, *rest = module.layers

    def refused(text, *layers, model_type="deepseek_v3"):
        with pytest.raises(ValueError, match=text):
            export_config(module.clone(layers=layers), {"model_type": model_type})

    refused("perceptrons in the first layers and experts in all after them", rest[0], first, rest[1])
    scaled = dataclasses.replace(first, mixer=dataclasses.replace(first.mixer, scale=0.5))
    refused("cannot express this model's layers", scaled, *rest)
    narrow = dataclasses.replace(first, mixer=dataclasses.replace(first.mixer, v_head_dim=8))
    refused("the config states v_head_dim once for all layers", narrow, *rest)
    refused("not supported: norm_topk_prob=True", first, *rest, model_type="deepseek_v2")
    refused("has no AttentionSpec. Received: mixer=LatentAttentionSpec", first, *rest, model_type="mixtral")


def logits(module, variables, tokens):
    return np.asarray(jax.jit(module.apply)(variables, tokens))


def test_a_balance_bias_that_weighs_exceeds_the_tolerance_a_hundredfold(monkeypatch, reference):
    want, model = reference("deepseek_v3"), load_pretrained(FIXTURES / "deepseek_v3")

    def weighing(scores, bias, spec):
        choice = choose(scores, bias, spec)
        biased = jnp.take_along_axis(jax.nn.sigmoid(scores) + bias, choice.experts, axis=-1)
        weights = spec.scale * biased / jnp.sum(biased, axis=-1, keepdims=True)
        return Choice(choice.experts, weights, choice.logits, choice.shares)

    monkeypatch.setattr(expert_dispatch, "choose", weighing)
    got = logits(model.module.clone(), model.variables, want["tokens"])
    assert np.abs(got - want["logits"]).max() > 1e-3 * np.abs(want["logits"]).max()


def written(directory, tensors, **fields):
    """Write tensors, and the config with further fields, into a copy of a fixture."""
    names = {np.dtype(jnp.float8_e4m3fn): "F8_E4M3", np.dtype(np.float32): "F32"}
    header, data = {}, b""
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value).tobytes()
        header[name] = {
            "dtype": names[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    (directory / "model.safetensors").write_bytes(safetensors_bytes(header, data))
    config = json.loads((directory / "config.json").read_text()) | fields
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def quantised(stored, rows, columns):
    """Round the matrices of the blocks to float8 with a scale each, and give what they then stand for too."""
    files, meant = {}, {}
    for name, value in stored.items():
        if value.ndim != 2 or not name.startswith("model.layers") or ".gate." in name:
            files[name] = meant[name] = value
            continue
        shape = tuple(-(-n // size) for n, size in zip(value.shape, (rows, columns), strict=True))
        scales = np.zeros(shape, np.float32)
        narrow, wide = np.zeros(value.shape, jnp.float8_e4m3fn), np.zeros(value.shape, np.float32)
        for block in np.ndindex(shape):
            own = tuple(slice(n * size, (n + 1) * size) for n, size in zip(block, (rows, columns), strict=True))
            scales[block] = np.abs(value[own]).max() / 448
            narrow[own] = (value[own] / scales[block]).astype(jnp.float8_e4m3fn)
            wide[own] = narrow[own].astype(np.float32) * scales[block]
        files[name], files[f"{name}_scale_inv"], meant[name] = narrow, scales, wide
    return files, meant


QUANTIZATION = PUBLISHED_V3["quantization_config"] | {"weight_block_size": [5, 7]}


def test_float8_blocks_are_multiplied_by_their_scales_on_any_mesh(copied, tensors, tmp_path):
    directory = copied("deepseek_v3")
    files, meant = quantised(tensors(directory), 5, 7)  # neither divides a matrix
    shutil.copytree(directory, tmp_path / "plain")
    plain = load_pretrained(written(tmp_path / "plain", meant))
    written(directory, files, quantization_config=QUANTIZATION)
    loaded = load_pretrained(directory, mesh={"fsdp": 2, "tensor": 2}, layout=Layout(min_shard=1, tolerance=0.5))
    assert loaded.module == plain.module
    jax.tree.map(np.testing.assert_array_equal, loaded.variables, plain.variables)
    narrow = load_pretrained(directory, dtype="bfloat16").variables
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)), narrow, plain.variables)
    save_pretrained(tmp_path / "out", loaded.module, loaded.variables, loaded.config)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    header, _ = read_header(tmp_path / "out" / "model.safetensors")
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"F32"}


def test_float8_without_its_scales_is_refused(copied, tensors):
    directory = copied("deepseek_v3")
    files, _ = quantised(tensors(directory), 5, 7)
    name = "model.layers.1.self_attn.o_proj.weight"
    short = files | {f"{name}_scale_inv": files[f"{name}_scale_inv"][:-1]}
    written(directory, short, quantization_config=QUANTIZATION)
    with pytest.raises(CheckpointError, match=rf"float8 tensor '{name}' of shape \(32, 24\) needs .*\(7, 4\)"):
        load_pretrained(directory)
    bare = {key: value for key, value in files.items() if not key.endswith("_scale_inv")}
    written(directory, bare, quantization_config=None)
    with pytest.raises(CheckpointError, match="float8_e4m3fn, a quantised form"):
        load_pretrained(directory)


def test_the_architecture_in_gguf_is_refused_with_the_list(tmp_path):
    path = tmp_path / "model.gguf"
    gguf_files.write(
        path, json.loads((FIXTURES / "deepseek_v2" / "config.json").read_text()), {}, architecture="deepseek2"
    )
    with pytest.raises(CheckpointError, match=r"GGUF architecture 'deepseek2' is not supported\. Known: llama"):
        describe(path)
