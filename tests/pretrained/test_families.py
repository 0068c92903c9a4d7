"""Configs are understood field by field: what changes the computation and is not known is refused by name."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dew.nn.attention import AttentionSpec
from dew.nn.backbones.causal_transformer import CausalTransformer
from dew.nn.rope import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling, rotary_tables
from dew.pretrained import CheckpointError, describe
from dew.pretrained.export import export_config
from dew.pretrained.families import FAMILIES
from dew.pretrained.families.fields import Fields
from tests.pretrained.checkpoints import FIXTURES, NAMES

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

LONGROPE = {"rope_type": "su", "partial_rotary_factor": 0.5, "short_factor": [1.0, 2.0], "long_factor": [2.0, 9.0]}


def rotary(directory):
    return describe(directory).module.layers[0].attention.rotary


def test_the_fields_reach_the_model():
    module = describe(FIXTURES / "llama_untied").module
    config = json.loads((FIXTURES / "llama_untied" / "config.json").read_text())
    layer = module.layers[0]
    assert (module.vocab_size, module.features, len(module.layers)) == (96, 48, 3)
    assert (layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_dim) == (4, 2, 16)
    assert (layer.attention.bias, layer.attention.out_bias, layer.mlp.bias) == (True, True, True)
    assert (layer.norm.eps, module.norm.eps, module.max_length) == (config["rms_norm_eps"],) * 2 + (256,)
    assert not module.tie_embeddings
    assert describe(FIXTURES / "qwen3").module.layers[0].attention.qk_norm == layer.norm


def test_an_unknown_family_is_refused_with_the_list_and_the_nearest(copied):
    with pytest.raises(
        CheckpointError, match=r"model_type='llamma' is not supported\. Known: llama, qwen3, .* 'llama'"
    ):
        describe(copied(model_type="llamma"))
    with pytest.raises(CheckpointError, match="model_type=None is not supported"):
        describe(copied("qwen3", model_type=None))


@pytest.mark.parametrize(
    "name, field",
    [
        *(("mixtral", "num_local_experts"), ("qwen2_moe", "num_experts"), ("qwen3_moe", "num_local_experts")),
        *(("granitemoe", "num_local_experts"), ("granitemoehybrid_experts", "num_local_experts")),
        *(("gpt_oss", "num_local_experts"), ("deepseek_v2", "n_routed_experts"), ("deepseek_v3", "n_routed_experts")),
        *(("qwen3_next", "num_experts"), ("qwen3_5_moe_text", "num_experts")),
    ],
)
def test_more_experts_than_a_layer_has_are_refused_before_any_is_named(copied, refused, name, field):
    refused(copied(name, **{field: 2**30}), f"{field}={2**30}; at most 4096 experts are read")


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_read_the_keys_and_values_of_others_are_refused_by_name(copied, name):
    with pytest.raises(CheckpointError, match="not supported: num_kv_shared_layers=1"):
        describe(copied(name, num_kv_shared_layers=1))


def test_more_experts_than_a_model_has_are_refused_before_any_is_named(copied, refused):
    refused(copied("mixtral", num_local_experts=4096, num_hidden_layers=33), "135168 experts in all; at most 131072")


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"logit_softcap": 30.0}, r"not supported: logit_softcap=30\.0\. If one changes nothing, remove it"),
        (
            {"attention_multiplier": 0.01, "embedding_multiplier": 12},
            "attention_multiplier=0.01, embedding_multiplier=12",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"attention_dropout": 1.0}, "attention_dropout must be from 0 up to 1"),
        ({"hidden_dropout": 0.1}, "hidden_dropout=0.1"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types="),
        ({"hidden_act": "xielu"}, "hidden_act='xielu' is not supported; known: silu"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope' needs 'short_factor'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type='proportional' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' needs 'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2, "beta": 1}}, "'linear' does not take 'beta'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor other than 1"),
        ({"rope_parameters": [1]}, "rope parameters must be an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_parameters and rope_scaling disagree"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be a positive number. Received: rope_theta=-1"),
        ({"rope_parameters": {"rope_theta": 1}}, "rotary theta must exceed 1"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 0.5}},
            "'yarn' needs an original context of 2 tokens or more",
        ),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number. Received: rms_norm_eps=1000"),
        ({"head_dim": 2**30}, "heads of 1073741824 dimensions; at most 65536"),
        ({"hidden_size": "absent"}, "the config lacks 'hidden_size'"),
        ({"hidden_size": 48.0}, r"hidden_size must be a positive whole number. Received: hidden_size=48\.0"),
        ({"hidden_size": True}, "hidden_size must be a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number. Received: rms_norm_eps='1e-5'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads"),
        ({"head_dim": "absent", "hidden_size": 50}, "hidden_size=50 is not a multiple"),
        ({"dtype": "int8"}, "dtype='int8' is not supported"),
    ],
    ids=str,
)
def test_a_field_that_is_not_understood_is_refused_by_name(copied, fields, text):
    with pytest.raises(CheckpointError, match=text):
        describe(copied(**fields))


def windows(directory):
    return [layer.attention.window for layer in describe(directory).module.layers]


def test_the_windows_of_qwen_begin_at_a_layer_where_they_are_in_use(copied):
    config = {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 1, "layer_types": "absent"}
    assert windows(copied("qwen3", **config)) == [None] * 3
    used = config | {"use_sliding_window": True}
    assert windows(copied("qwen3_untied", **used)) == [None, 7, 7]
    # Stated kinds win over the layer number.
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert windows(copied("qwen2", **used | {"layer_types": kinds})) == [7, None, None]


def test_an_absent_window_is_the_default_and_null_is_none(copied):
    assert windows(copied("mistral", sliding_window="absent")) == [4096] * 3
    assert windows(copied("gemma2", sliding_window=None, layer_types=["full_attention"] * 3)) == [None] * 3
    config = json.loads((FIXTURES / "mistral" / "config.json").read_text())
    layers = FAMILIES["mistral"].translate(Fields(config | {"sliding_window": None}, "here"))["layers"]
    assert [layer.attention.window for layer in layers] == [None] * 3


def test_gemma_layers_alternate_and_gemma_3_layers_have_bases_of_their_own(copied):
    assert windows(copied("gemma2", layer_types="absent")) == [8, None, 8]
    older = {"sliding_window_pattern": 3, "rope_theta": 3e5, "rope_local_base_freq": 2e3}
    older |= {
        "layer_types": "absent",
        "rope_parameters": "absent",
        "rope_scaling": {"rope_type": "linear", "factor": 8},
    }
    module = describe(copied("gemma3_text", **older, _sliding_window_pattern="absent")).module
    assert [layer.attention.window for layer in module.layers] == [8, 8, None]
    rotaries = [(layer.attention.rotary.theta, layer.attention.rotary.scaling) for layer in module.layers]
    assert rotaries == [(2e3, None)] * 2 + [(3e5, LinearScaling(factor=8.0))]


@pytest.mark.parametrize(
    "name, fields, text",
    [
        ("gemma2", {"sliding_window": None}, "layer_types has sliding_attention, but no sliding_window is in use"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types must say .* for each of 3 layers"),
        (
            "gemma2",
            {"layer_types": ["chunked_attention"] * 3},
            "layer_types must say full_attention or sliding_attention",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma2", {"hidden_activation": "gelu_fast"}, "hidden_activation='gelu_fast' is not supported"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters must hold objects for"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act='silu' is not supported"),
        ("qwen2", {"attention_bias": True}, "attention_bias=True"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers must be a whole number of 0 or more"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must say 1 for each of 3 layers"),
        ("olmo3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters must hold objects for"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a positive number"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "known: default, longrope, su, yarn"),
        ("phi3", {"partial_rotary_factor": 1.5, "rope_parameters": {"rope_theta": 1e4}}, "must not exceed 1"),
        ("phi3", {"rope_parameters": LONGROPE | {"short_factor": [1.0]}}, "needs 2 short and long factors .* 1 and 2"),
        ("phi3", {"rope_parameters": {"rope_type": []}}, r"rope_type=\[\] is not supported"),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 1}, "original context of 2 tokens"),
        ("gemma3_text", {"rope_parameters": {"full_attention": [1]}}, "rope_parameters must hold objects"),
        ("gemma2", {"layer_types": [[], [], []]}, "layer_types must say full_attention or sliding_attention"),
        ("granite", {"logits_scaling": 5e-324}, "1 / logits_scaling must be a positive number"),
        ("phi3", {"embd_pdrop": 0.1}, r"embd_pdrop=0\.1"),
        ("mistral", {"layer_types": ["sliding_attention"] * 3}, "layer_types="),
        ("gpt_neox", {"hidden_size": 30}, "hidden_size=30 is not a multiple of num_attention_heads=4"),
        ("gpt_neox", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ("gpt_neox", {"rope_theta": 5e4}, r"rope_theta=50000\.0"),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.125}}, "rotary needs an even width"),
        ("gpt2", {"n_embd": 30}, "n_embd=30 is not a multiple of n_head=4"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("gpt2", {"n_ctx": 32}, "n_ctx=32"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type=rms_norm"),
        ("cohere2", {"head_dim": 16}, "head_dim=16"),
        ("cohere2", {"sliding_window": None}, "layer_types has sliding_attention, but no sliding_window is in use"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm=True"),
        ("mixtral", {"num_experts_per_tok": 5}, "top_k=5 exceeds the 4 experts of 1 of 1 groups of 4"),
        ("mixtral", {"router_jitter_noise": 0.1}, r"router_jitter_noise=0\.1"),
        *[
            ("mixtral", {"router_aux_loss_coef": value}, "router_aux_loss_coef must be a finite number of 0 or more")
            for value in (-1, "x", True, float("inf"), float("nan"))
        ],
        ("qwen2_moe", {"mlp_only_layers": [7]}, "mlp_only_layers must list numbers of the 3 layers"),
        ("qwen3_moe", {"num_experts": 7}, "num_experts and num_local_experts disagree"),
        ("granitemoe", {"hidden_act": "xielu"}, "hidden_act='xielu' is not supported"),
        ("glm4", {"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads"),
        (
            "mamba2",
            {"num_heads": 6},
            r"num_heads \* head_dim must be expand \* hidden_size = 64\. Received",
        ),
        ("mamba2", {"n_groups": 3}, "num_heads a multiple of num_groups"),
        ("mamba2", {"hidden_act": "gelu_fast"}, "hidden_act='gelu_fast' is not supported"),
        ("mamba2", {"time_step_limit": [0.1]}, r"time_step_limit must be two numbers\. Received: .*\[0\.1\]"),
        ("mamba2", {"time_step_limit": [0.0, "much"]}, "time_step_limit must be two numbers"),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}, "step_limits must be 0 <= low < high"),
        ("mamba2", {"norm_before_gate": True}, "norm_before_gate=True"),
        ("bamba", {"attn_layer_indices": [4]}, r"attn_layer_indices must list numbers of the 4 layers\. .*\[4\]"),
        ("bamba", {"partial_rotary_factor": 0.25}, "takes partial_rotary_factor from rope_parameters alone"),
        ("bamba", {"attn_rotary_emb": 8}, "attn_rotary_emb=8"),
        ("bamba", {"z_loss_coefficient": 0.1}, r"z_loss_coefficient=0\.1"),
        ("bamba", {"mamba_d_head": 16}, r"mamba_n_heads \* mamba_d_head must be mamba_expand \* hidden_size = 32"),
        ("granitemoehybrid", {"num_local_experts": 1}, "top_k=2 exceeds the 1 experts"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "must be 'rope', 'nope' or null"),
        ("granitemoehybrid", {"layer_types": ["mamba"]}, "layer_types must say .* for each of 4 layers"),
        ("granitemoehybrid", {"normalization_function": "layernorm"}, "normalization_function=layernorm"),
    ],
    ids=str,
)
def test_what_a_family_cannot_mean_is_refused(copied, name, fields, text):
    with pytest.raises(CheckpointError, match=text):
        describe(copied(name, **fields))


def test_gelu_means_its_tanh_form_in_gemma_1_alone(copied):
    assert describe(copied("gemma", hidden_act="gelu")).module.layers[0].mlp.activation == "gelu_tanh"
    assert describe(copied("gemma2", hidden_activation="gelu")).module.layers[0].mlp.activation == "gelu"


def first_layer(directory):
    return describe(directory).module.layers[0]


def test_pythia_and_gpt_neox_say_their_rotation_in_fields_of_their_own(copied):
    older = {"rope_parameters": "absent", "rotary_emb_base": 5e3, "rotary_pct": 0.25, "hidden_act": "gelu_fast"}
    layer = first_layer(copied("gpt_neox", **older, use_parallel_residual=False, attention_bias=False))
    assert (layer.attention.rotary.theta, layer.attention.rotary.fraction) == (5e3, 0.25)
    assert (layer.placement, layer.mlp.activation, layer.attention.out_bias) == ("pre", "gelu_tanh", False)


def test_absent_fields_of_gpt_neox_mean_a_quarter_in_parallel(copied):
    names = ("rope_parameters", "use_parallel_residual", "attention_bias", "hidden_act", "layer_norm_eps")
    layer = first_layer(copied("gpt_neox", **dict.fromkeys(names, "absent")))
    assert (layer.attention.rotary.fraction, layer.placement, layer.attention.bias) == (0.25, "parallel", True)
    assert (layer.mlp.activation, layer.norm.eps) == ("gelu", 1e-5)


def test_the_published_config_of_gpt2_is_understood(copied):
    names = ("n_inner", "tie_word_embeddings", "scale_attn_weights", "scale_attn_by_inverse_layer_idx")
    summary = {"summary_type": "cls_index", "summary_first_dropout": 0.1, "n_ctx": 64, "attn_pdrop": 0.1}
    module = describe(copied("gpt2", **dict.fromkeys(names, "absent"), **summary)).module
    assert (module.layers[0].mlp.features, module.tie_embeddings, module.embedding.positions) == (128, True, 64)
    assert [layer.attention.scale for layer in module.layers] == [None] * 3


@pytest.mark.parametrize("by_depth, want", [(False, [1.0] * 3), (True, [1.0, 1 / 2, 1 / 3])])
def test_gpt2_may_leave_out_the_width_of_a_head(by_depth, want, copied):
    fields = {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": by_depth}
    described = describe(copied("gpt2", **fields))
    assert [layer.attention.logit_scale for layer in described.module.layers] == want
    written = described.family.config_dict(described.module)
    assert {name: written[name] for name in fields} == fields


def test_the_published_config_of_starcoder2_is_understood(copied):
    also = {"norm_type": "layer_norm", "mlp_type": "default", "tie_word_embeddings": "absent"}
    module = describe(copied("starcoder2", **also, num_key_value_heads="absent", use_bias=False)).module
    attention = module.layers[0].attention
    assert (module.tie_embeddings, attention.num_kv_heads, attention.window) == (True, 2, 8)
    assert not attention.bias
    assert not attention.out_bias
    assert not module.layers[0].mlp.bias


KEY_VALUE_HEADS = {
    "mistral": 8,
    "glm4": 2,
    "llama": 32,
    "qwen2": 32,
    "qwen3": 32,
    "gemma": 16,
    "gemma2": 4,
    "gemma3_text": 4,
    "smollm3": 4,
    "olmo2": 32,
    "olmo3": 32,
    "granite": 32,
    "phi3": 32,
    "cohere2": 32,
    "starcoder2": 2,
}


@pytest.mark.parametrize("name, count", KEY_VALUE_HEADS.items())
def test_absent_and_null_key_value_heads_are_those_of_the_config_class(copied, name, count):
    fields = {"num_attention_heads": 32, "hidden_size": 256}
    config = json.loads((FIXTURES / name / "config.json").read_text()) | fields
    for null, want in ((False, count), (True, 32)):
        config.pop("num_key_value_heads", None)
        arguments = FAMILIES[name].translate(Fields({**config, **({"num_key_value_heads": None} if null else {})}, "x"))
        assert arguments["layers"][0].attention.num_kv_heads == want


def test_starcoder2_without_a_window_has_none(copied):
    assert windows(copied("starcoder2", sliding_window="absent")) == [None] * 3


def test_the_published_config_of_bamba_is_understood(copied):
    absent = dict.fromkeys(("rope_parameters", "time_step_limit", "mamba_d_head", "num_key_value_heads"), "absent")
    published = {"attn_rotary_emb": 4, "rope_theta": 5e4, "num_logits_to_keep": 1, "num_attention_heads": 8}
    module = describe(copied("bamba", **absent, **published, hidden_size=64, z_loss_coefficient=0.0)).module
    attention, scan = module.layers[2].attention, module.layers[0].mixer
    assert (attention.rotary.theta, attention.rotary.fraction, attention.num_kv_heads) == (5e4, 0.5, 8)
    assert (scan.head_dim, scan.step_limits, scan.norm_groups) == (16, (0.0, math.inf), 1)


def test_the_published_config_of_mamba2_is_understood(copied):
    infinite = {"time_step_limit": [0.0, math.inf], "rms_norm": True, "tie_word_embeddings": True}
    absent = dict.fromkeys(("use_bias", "use_conv_bias", "layer_norm_epsilon", "residual_in_fp32"), "absent")
    module = describe(copied("mamba2", **infinite, **absent)).module
    layer = module.layers[0]
    assert (layer.mixer.step_limits, layer.mixer.conv_bias, layer.mixer.bias) == ((0.0, math.inf), True, False)
    assert (layer.norm.eps, layer.residual_in_float32, module.max_length) == (1e-5, True, 2**20)
    assert module.tie_embeddings


@pytest.mark.parametrize(
    "kinds, rotates, attends",
    [
        ({"layer_types": ["attention"] * 4, "position_embedding_type": "rope", "rope_theta": 5e4}, True, [True] * 4),
        ({"layer_types": "absent", "position_embedding_type": "nope", "rope_theta": 5e4}, None, [False] * 4),
        ({"layers_block_type": ["mamba", "attention"] * 2, "layer_types": "absent"}, False, [False, True] * 2),
    ],
    ids=["dense Granite 4", "scans alone", "the older name of the field"],
)
def test_the_published_configs_of_granite_hybrids_are_understood(kinds, rotates, attends, copied):
    published = {"normalization_function": "rmsnorm", "init_method": "mup", "mamba_chunk_size": 256}
    module = describe(copied("granitemoehybrid", **kinds, **published, rope_parameters="absent")).module
    mixers = [layer.mixer for layer in module.layers]
    assert [isinstance(mixer, AttentionSpec) for mixer in mixers] == attends
    if rotates is not None:
        rotary = next(mixer for mixer in mixers if isinstance(mixer, AttentionSpec)).rotary
        assert (rotary is not None and rotary.theta == 5e4) == rotates
    _, written = export_config(module, {"model_type": "granitemoehybrid"})
    assert written["layer_types"] == ["full_attention" if each else "linear_attention" for each in attends]


def test_a_granite_hybrid_states_experts_for_all_layers_or_none():
    module = describe(FIXTURES / "granitemoehybrid_experts").module
    assert module.router_training.balance_loss == 0.02  # 0.01 for each of 2 slots
    first, *rest = module.layers
    some = module.clone(layers=(first, *(dataclasses.replace(layer, mlp=first.experts.shared) for layer in rest)))
    with pytest.raises(ValueError, match="experts in every layer or in none"):
        export_config(some, {"model_type": "granitemoehybrid"})
    unshared = dataclasses.replace(first.experts, shared=None)
    with pytest.raises(ValueError, match="has a shared perceptron beside the experts"):
        export_config(
            module.clone(layers=tuple(dataclasses.replace(layer, mlp=unshared) for layer in module.layers)),
            {"model_type": "granitemoehybrid"},
        )


@pytest.mark.parametrize(
    "change, text",
    [
        ({"norm_groups": 1}, "norm_groups as num_groups"),
        ({"head_dim": 9}, "the scan's width as a multiple of the model's"),
    ],
)
def test_a_scan_that_no_config_expresses_is_refused(change, text):
    module = describe(FIXTURES / "mamba2").module
    layers = tuple(
        dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **change)) for layer in module.layers
    )
    with pytest.raises(ValueError, match=f"mamba2: .*{text}"):
        export_config(module.clone(layers=layers), {"model_type": "mamba2"})


def test_a_model_of_another_kind_is_not_written_as_these():
    llama = describe(FIXTURES / "llama").module
    with pytest.raises(ValueError, match="a Mamba-2 config has a scan alone in every layer"):
        export_config(llama, {"model_type": "mamba2"})
    with pytest.raises(ValueError, match=r"llama: the block has no AttentionSpec\. Received: mixer=Mamba2Spec"):
        export_config(describe(FIXTURES / "mamba2").module, {"model_type": "llama"})
    alone = llama.clone(layers=tuple(dataclasses.replace(layer, mlp=None) for layer in llama.layers))
    message = r"the config has a perceptron in every layer\. Received: a layer with mlp=None"
    with pytest.raises(ValueError, match=message):
        export_config(alone, {"model_type": "llama"})


def test_the_published_config_of_command_r7b_is_understood(copied):
    published = {"layer_switch": 2, "sliding_window_pattern": 2, "position_embedding_type": "rope_gptj"}
    published |= {"rotary_pct": 1.0, "use_qk_norm": False, "use_parallel_block": True, "head_dim": 8}
    absent = dict.fromkeys(("layer_types", "logit_scale", "rope_parameters", "sliding_window"), "absent")
    module = describe(copied("cohere2", **published, **absent, rope_theta=5e4)).module
    assert [layer.attention.window for layer in module.layers] == [4096, None, 4096]
    rotaries = [layer.attention.rotary and layer.attention.rotary.theta for layer in module.layers]
    assert (rotaries, module.head.scale) == ([5e4, None, 5e4], 0.0625)


def test_absent_fields_of_glm4_take_the_defaults_of_the_config_class(copied):
    names = ("head_dim", "num_key_value_heads", "attention_bias", "rms_norm_eps", "rope_parameters")
    layer = first_layer(copied("glm4", **dict.fromkeys(names, "absent")))
    assert (layer.attention.head_dim, layer.attention.num_kv_heads, layer.attention.bias) == (128, 2, True)
    assert (layer.norm.eps, layer.attention.rotary.fraction, layer.attention.out_bias) == (1.5625e-7, 0.5, False)


def test_layers_without_rotary_are_every_fourth_or_those_listed(copied):
    def rotated(**fields):
        config = json.loads((FIXTURES / "smollm3" / "config.json").read_text()) | fields
        layers = FAMILIES["smollm3"].translate(Fields(config, "here"))["layers"]
        return [layer.attention.rotary is not None for layer in layers]

    assert rotated(no_rope_layers=None, no_rope_layer_interval=None, num_hidden_layers=5, layer_types=None) == [
        *(True, True, True, False, True)
    ]
    assert rotated(no_rope_layers=[0, 1, 0]) == [False, True, False]
    window = {"use_sliding_window": True, "sliding_window": 7, "no_rope_layers": [0, 1, 0], "layer_types": None}
    assert windows(copied("smollm3", **window)) == [7, None, 7]


def test_a_balance_loss_counts_where_router_logits_are_put_out(copied):
    def weight(**fields):
        return describe(copied("mixtral", **fields)).module.router_training.balance_loss

    assert weight(router_aux_loss_coef=0.02) == 0
    assert describe(FIXTURES / "qwen3_moe").module.router_training.balance_loss == 0.03  # 0.01 for each of 3 slots


def test_a_config_without_any_sparse_layer_trains_no_router(copied):
    fields = {"mlp_only_layers": [0, 1, 2], "output_router_logits": True, "router_aux_loss_coef": 0.01}
    module = describe(copied("qwen2_moe", **fields)).module
    assert module.expert_layers == ()
    assert not module.trains_routers


def test_layers_with_experts_are_every_second_or_all_but_those_listed(copied):
    def sparse(**fields):
        config = json.loads((FIXTURES / "qwen2_moe" / "config.json").read_text()) | fields
        layers = FAMILIES["qwen2_moe"].translate(Fields(config, "here"))["layers"]
        return [hasattr(layer.mlp, "num_experts") for layer in layers]

    assert sparse() == [False, True, True]
    assert sparse(mlp_only_layers=[], decoder_sparse_step=2) == [False, True, False]
    assert sparse(mlp_only_layers=[1], decoder_sparse_step=2) == [False, False, False]


def test_the_published_config_of_qwen1_5_moe_is_understood(copied):
    published = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21, "layer_types": "absent"}
    assert windows(copied("qwen2_moe", **published)) == [None] * 3
    used = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": "absent"}
    config = json.loads((FIXTURES / "qwen2_moe" / "config.json").read_text()) | used
    config.pop("layer_types")
    layers = FAMILIES["qwen2_moe"].translate(Fields({**config, "layer_types": None}, "here"))["layers"]
    assert [layer.attention.window for layer in layers] == [8, None, None]


def test_longrope_sharpens_by_the_stretch_of_the_context(copied):
    older = {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": LONGROPE, "max_position_embeddings": 4096}
    scaling = rotary(copied("phi3", **older, original_max_position_embeddings=256)).scaling
    assert (scaling.short_factor, scaling.long_factor, scaling.original_max_length) == ((1, 2), (2, 9), 256)
    np.testing.assert_allclose(scaling.attention_factor, np.sqrt(1 + np.log(16) / np.log(256)))


@pytest.mark.parametrize("divisor", [1.0, 3.0, 6.0, 7.0, 8.0, 16.0, 49.0, 0.3])
def test_a_divisor_of_the_logits_comes_back_as_it_was(divisor):
    config = json.loads((FIXTURES / "granite" / "config.json").read_text()) | {"logits_scaling": divisor}
    family = FAMILIES["granite"]
    arguments = family.translate(Fields(config, "here"))
    assert arguments["head"].scale == 1 / divisor
    assert family.config_dict(CausalTransformer(**arguments))["logits_scaling"] == divisor


def test_inert_fields_change_nothing(copied):
    inert = {
        "use_cache": False,
        "initializer_range": 0.5,
        "pretraining_tp": 4,
        "transformers_version": "4.0",
        "top_k": 5,
    }
    assert describe(copied(**inert)).module == describe(FIXTURES / "llama").module


def test_the_published_config_of_smollm2_is_understood(copied):
    extra = {
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 1e5,
        "use_cache": True,
    }
    published = {**extra, "transformers.js_config": {"dtype": "q4"}, "torch_dtype": "bfloat16", "dtype": "absent"}
    module = describe(copied(**published, rope_parameters="absent")).module
    assert module.layers[0].attention.rotary.theta == 1e5
    assert module.dtype == "bfloat16"


def test_absent_fields_take_the_defaults_of_the_config_class(copied):
    names = ("rms_norm_eps", "num_key_value_heads", "head_dim", "rope_parameters", "tie_word_embeddings", "hidden_act")
    module = describe(copied(**dict.fromkeys(names, "absent"))).module
    attention = module.layers[0].attention
    assert (module.norm.eps, attention.num_kv_heads, attention.head_dim) == (1e-6, 4, 12)
    assert (attention.rotary.theta, module.tie_embeddings) == (10000.0, False)
    # Qwen3's class has a head width of its own.
    qwen3 = describe(copied("qwen3", head_dim="absent")).module
    assert qwen3.layers[0].attention.head_dim == 128


def test_older_spellings_of_rotary_fields_are_read(copied, tmp_path):
    older = {"rope_parameters": "absent", "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    spec = rotary(copied(**older))
    assert spec.theta == 5e5
    assert spec.scaling == Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=128)
    assert rotary(copied("qwen3", rope_parameters="absent", rope_theta=1e6, rope_scaling=None)).theta == 1e6


@pytest.mark.parametrize(
    "parameters, want",
    [
        ({"rope_type": "linear", "factor": 4}, LinearScaling(factor=4.0)),
        ({"rope_type": "dynamic", "factor": 2.0}, DynamicScaling(factor=2.0, original_max_length=256)),
        ({"rope_type": "yarn", "factor": 4.0}, YarnScaling(factor=4.0, original_max_length=256)),
        (
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "truncate": False,
                "beta_fast": 16,
                "original_max_position_embeddings": 64,
            },
            YarnScaling(factor=4.0, original_max_length=64, beta_fast=16.0, truncate=False),
        ),
    ],
)
def test_scalings_are_read(copied, parameters, want):
    assert rotary(copied(rope_parameters={"rope_theta": 1e4, **parameters})).scaling == want


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn"])
@pytest.mark.parametrize("position", [0, 1, 255, 8193])
def test_rotary_tables_are_those_of_transformers(copied, kind, position):
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": kind, "rope_theta": 5e4}
    parameters |= LLAMA3 if kind == "llama3" else {"factor": 4.0} if kind != "default" else {}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = 64
    directory = copied(rope_parameters=parameters)
    config = LlamaConfig.from_pretrained(directory)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([[position]]))
    got = rotary_tables(rotary(directory), 12, jnp.array([[position]]))
    for ours, theirs in zip(got, (cos, sin), strict=True):
        # The angle itself carries float32 rounding, so far out the tables agree to the rounding of the angle.
        np.testing.assert_allclose(ours[0, 0], theirs[0, 0, :6], atol=1e-6 + 2.5e-7 * position)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_is_written_as_it_was_read(name):
    described = describe(FIXTURES / name)
    written = described.family.config_dict(described.module)
    for field, value in written.items():
        if field != "use_sliding_window":
            assert described.config[field] == value, field
    read_back = described.family.translate(Fields(written, "written"))
    assert all(getattr(described.module, field) == value for field, value in read_back.items())


def test_the_index_of_families_is_explicit():
    assert {name: family.model_type for name, family in FAMILIES.items()} == {name: name for name in FAMILIES}


def test_describing_starts_no_device_memory():
    before = len(jax.live_arrays())
    describe(FIXTURES / "qwen3")
    assert len(jax.live_arrays()) <= before
