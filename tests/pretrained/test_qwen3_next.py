"""Configs and weights of the gated delta net hybrids: Qwen3-Next, and what Qwen3.5 shares with it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dew.kernels.delta_rule import delta_rule
from dew.nn.attention import AttentionSpec
from dew.nn.gated_delta_net import GatedDeltaNetSpec
from dew.nn.moe import ExpertsSpec
from dew.parallel import delta_scan
from dew.pretrained import CheckpointError, describe, load_pretrained
from dew.pretrained.families import FAMILIES
from dew.pretrained.families.fields import Fields
from tests.pretrained.checkpoints import DELTA, FIXTURES, read_header, safetensors_bytes

ABSENT = dict.fromkeys(("layer_types", "rope_parameters", "dtype"), "absent")
# What the published config.json of Qwen3-Next-80B-A3B says beside its sizes.
QWEN3_NEXT = ABSENT | {
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "mlp_only_layers": [],
    "num_hidden_layers": 4,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}


def mixers(directory):
    return [layer.mixer for layer in describe(directory).module.layers]


def test_the_fields_reach_the_model():
    module = describe(FIXTURES / "qwen3_next").module
    delta, attention = module.layers[0].mixer, module.layers[1].attention
    assert delta == GatedDeltaNetSpec(num_heads=4, head_dim=6, num_keys=2, key_dim=8, conv_kernel=4, norm_eps=1e-4)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.gate) == (4, 1, 16, True)
    assert (attention.rotary.theta, attention.rotary.fraction, attention.bias) == (100.0, 0.25, False)
    assert {each.offset for each in (module.norm, module.layers[0].norm, attention.qk_norm)} == {1.0}
    assert [isinstance(layer.mlp, ExpertsSpec) for layer in module.layers] == [False, True, True]


def test_the_published_config_of_qwen3_next_is_understood(copied):
    module = describe(copied("qwen3_next", **QWEN3_NEXT)).module
    assert [isinstance(layer.mixer, AttentionSpec) for layer in module.layers] == [False, False, False, True]
    rotary = module.layers[3].attention.rotary
    assert (rotary.theta, rotary.fraction, module.dtype) == (1e7, 0.25, "bfloat16")


@pytest.mark.parametrize(
    "name, experts, heads", [("qwen3_next", 10, 2), ("qwen3_5_text", None, 4), ("qwen3_5_moe_text", 8, 2)]
)
def test_absent_fields_take_the_defaults_of_the_config_class(name, experts, heads):
    kept = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = json.loads((FIXTURES / name / "config.json").read_text())
    config = {key: config[key] for key in (*kept, "num_experts", "moe_intermediate_size") if key in config}
    config["num_hidden_layers"] = 4
    arguments = FAMILIES[name].translate(
        Fields({**config, "num_experts": 16}, "here") if experts else Fields(config, "")
    )
    delta, attention = arguments["layers"][0].mixer, arguments["layers"][3].attention
    assert delta == GatedDeltaNetSpec(num_heads=32, head_dim=128, num_keys=16, key_dim=128)
    assert (attention.num_kv_heads, attention.head_dim, attention.bias) == (heads, 256, False)
    assert (attention.rotary.theta, attention.rotary.fraction, attention.qk_norm.eps) == (1e4, 0.25, 1e-6)
    assert (arguments["max_length"], arguments["tie_embeddings"]) == (32768, False)
    if experts:
        router = arguments["layers"][0].experts.router
        assert (router.top_k, router.normalise, arguments["layers"][0].experts.shared.features) == (experts, True, 512)


@pytest.mark.parametrize(
    "name, fields, text",
    [
        ("qwen3_next", {"layer_types": ["full_attention"] * 2}, "layer_types must say .* for each of 3 layers"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 3}, r"Received: layer_types=\['sliding_attention'"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "num_heads a multiple of num_keys.* num_keys=3"),
        ("qwen3_next", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval must be a positive"),
        ("qwen3_5_text", {"linear_num_key_heads": 4}, "num_heads a multiple of num_keys.* num_keys=4"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate=False"),
        ("qwen3_5_text", {"num_experts": 4}, "num_experts=4"),
        ("qwen3_5_text", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype=bfloat16"),
        ("qwen3_5_text", {"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers must be a whole number of 0 or more"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("qwen3_5_moe_text", {"num_experts_per_tok": 5}, "top_k=5"),
    ],
)
def test_what_would_change_the_computation_is_refused(name, fields, text, copied):
    with pytest.raises(CheckpointError, match=text):
        describe(copied(name, **fields))


def fused(stored):
    """Tensors with the experts of a layer in one."""
    experts = {name: value for name, value in stored.items() if ".experts." in name}
    blocks = {name.split(".experts.")[0] + ".experts" for name in experts}
    result = {name: value for name, value in stored.items() if name not in experts}
    for block in blocks:
        gate, up, down = (
            np.stack([experts[f"{block}.{expert}.{kind}_proj.weight"] for expert in range(4)])
            for kind in ("gate", "up", "down")
        )
        result |= {f"{block}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{block}.down_proj": down}
    return result


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe_text"])
def test_experts_of_a_layer_in_one_tensor_are_read(copied, tensors, name):
    directory, stored = copied(name), fused(tensors(FIXTURES / name))
    save_file(stored, directory / "model.safetensors")
    got, want = load_pretrained(directory), load_pretrained(FIXTURES / name)
    jax.tree.map(np.testing.assert_array_equal, got.variables, want.variables)
    block = "model.layers.1.mlp.experts"
    save_file(stored | {f"{block}.1.up_proj.weight": np.zeros((8, 32), "float32")}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.weight' is stored twice, also in"):
        load_pretrained(directory)
    save_file(stored | {f"{block}.gate_up_proj": np.zeros((4, 7, 32), "float32")}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match="must hold gate_proj and up_proj of all experts"):
        load_pretrained(directory)


@pytest.mark.parametrize("shape", [[2**40, 2, 0], [2**40, 0, 2], [0, 2, 2], [2**40, 0]])
def test_experts_that_take_no_bytes_are_refused_whatever_their_number(copied, refused, shape):
    directory = copied("qwen3_next")
    header, data = read_header(directory / "model.safetensors")
    header["model.layers.0.mlp.experts.gate_up_proj"] = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    (directory / "model.safetensors").write_bytes(safetensors_bytes(header, data))
    refused(directory, r"at most 4096 experts\. Received: shape \(")


def undecayed(v, k, q, log_decay, beta, **options):
    return delta_rule(v, k, q, 0 * log_decay, beta, **options)


def fully_corrected(v, k, q, log_decay, beta, **options):
    return delta_rule(v, k, q, log_decay, 0 * beta + 1, **options)


@pytest.mark.parametrize("name", DELTA)
@pytest.mark.parametrize(
    "attribute, other",
    [("delta_rule", undecayed), ("delta_rule", fully_corrected), ("unit", lambda x: x.astype(jnp.float32))],
    ids=["undecayed", "fully corrected", "keys of any length"],
)
def test_a_wrong_rule_exceeds_the_tolerance_a_hundredfold(name, attribute, other, reference, monkeypatch):
    want, model = reference(name), load_pretrained(FIXTURES / name)
    monkeypatch.setattr(delta_scan, attribute, other)
    got = np.asarray(jax.jit(lambda variables: model.module.apply(variables, want["tokens"]))(model.variables))
    assert not np.abs(got - want["logits"]).max() <= 1e-3 * np.abs(want["logits"]).max()
