"""GPT-NeoX and Pythia: layer norms, attention and perceptron in parallel, partial rotation, one fused projection."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import ACTIVATIONS, arguments_of, layer_config, mlp_of, model_config, own_keys_of
from dew.pretrained.families.family import Family, linear, norm
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.rotary import read_rotary, write_rotary
from dew.pretrained.recipe import Weight, fused_weights

STORED, BLOCK = "gpt_neox.layers.{i}", "params/layers_{i}"
_HEADS = tuple(f"{BLOCK}/self_attn/{name}_proj" for name in "qkv")
WEIGHTS = (
    Weight("params/embed_tokens/embedding", "gpt_neox.embed_in.weight", "V D -> V D"),
    # Query, key and value of one head follow each other, then those of the next: H is the fused dimension.
    *fused_weights(
        f"{STORED}.attention.query_key_value.weight",
        *((f"{path}/kernel", "(N H) D -> D N H", "H") for path in _HEADS),
    ),
    *fused_weights(
        f"{STORED}.attention.query_key_value.bias", *((f"{path}/bias", "(N H) -> N H", "H") for path in _HEADS)
    ),
    *linear(f"{BLOCK}/self_attn/o_proj", f"{STORED}.attention.dense", "D (N H) -> N H D"),
    *linear(f"{BLOCK}/mlp/up_proj", f"{STORED}.mlp.dense_h_to_4h", "F D -> D F"),
    *linear(f"{BLOCK}/mlp/down_proj", f"{STORED}.mlp.dense_4h_to_h", "D F -> F D"),
    *norm(f"{BLOCK}/input_layernorm", f"{STORED}.input_layernorm"),
    *norm(f"{BLOCK}/post_attention_layernorm", f"{STORED}.post_attention_layernorm"),
    *norm("params/norm", "gpt_neox.final_layer_norm"),
    Weight("params/lm_head/embedding", "embed_out.weight", "V D -> V D"),
)


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `GPTNeoXConfig`."""
    norm = NormSpec(kind="layer", eps=fields.number("layer_norm_eps", 1e-5), bias=True, cast="after_scale")
    max_length = fields.count("max_position_embeddings", 2048)
    rotary = read_rotary(
        fields, max_length, default_fraction=0.25, names=("rotary_emb_base", "rotary_pct"), partial=True
    )
    bias = fields.flag("attention_bias", True)
    attention = own_keys_of(fields, bias=bias, out_bias=bias, rotary=rotary)
    mlp = mlp_of(fields, default="gelu", choices={**ACTIVATIONS, "gelu_fast": "gelu_tanh"}, gated=False, bias=True)
    parallel = fields.flag("use_parallel_residual", True)
    layer = LayerSpec(mixer=attention, mlp=mlp, norm=norm, placement="parallel" if parallel else "pre")
    layers, rate = (layer,) * fields.count("num_hidden_layers"), fields.rate("hidden_dropout")
    arguments = arguments_of(fields, layers, norm, max_length, dropout_rate=rate, embedding_dropout_rate=rate)
    fields.get("classifier_dropout", None)
    # What later releases wrote beside the fields of this class, which alone are read.
    also = {"rope_theta": rotary.theta, "partial_rotary_factor": rotary.fraction, "head_dim": attention.head_dim}
    fields.finish({name: (value,) for name, value in also.items()})
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `GPTNeoXConfig`."""
    config = layer_config(
        module,
        lambda layer: {
            "attention_bias": layer.attention.bias,
            "rope_parameters": write_rotary(layer.attention.rotary, module.max_length, partial=True),
            "use_parallel_residual": layer.placement == "parallel",
        },
        eps="layer_norm_eps",
    )
    implied = ("head_dim", "num_key_value_heads")
    kept = {name: value for name, value in config.items() if name not in implied}
    return {**model_config(module), **kept, "hidden_dropout": module.dropout_rate}


FAMILY = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    translate=translate,
    config_dict=config_dict,
    weights=WEIGHTS,
    ignorable=(
        *(f"gpt_neox.layers.*.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
        "gpt_neox.rotary_emb.inv_freq",
    ),
)
