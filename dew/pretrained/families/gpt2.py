"""GPT-2: learned positions, layer norms, a plain gelu perceptron, and kernels stored [in, out]."""

from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.embed import EmbeddingSpec
from dew.nn.mlp import MlpSpec
from dew.nn.norm import NormSpec
from dew.pretrained.families.decoder import ACTIVATIONS, layer_config, model_config, own_keys_of, with_attention
from dew.pretrained.families.family import Family, norm
from dew.pretrained.families.fields import Fields
from dew.pretrained.recipe import Weight, fused_weights

STORED, BLOCK = "transformer.h.{i}", "params/layers_{i}"
_HEADS = tuple(f"{BLOCK}/self_attn/{name}_proj" for name in "qkv")
WEIGHTS = (
    Weight("params/embed_tokens/embedding", "transformer.wte.weight", "V D -> V D"),
    Weight("params/embed_positions/embedding", "transformer.wpe.weight", "V D -> V D"),
    *fused_weights(f"{STORED}.attn.c_attn.weight", *((f"{path}/kernel", "D (N H) -> D N H", "N") for path in _HEADS)),
    *fused_weights(f"{STORED}.attn.c_attn.bias", *((f"{path}/bias", "(N H) -> N H", "N") for path in _HEADS)),
    Weight(f"{BLOCK}/self_attn/o_proj/kernel", f"{STORED}.attn.c_proj.weight", "(N H) D -> N H D"),
    Weight(f"{BLOCK}/self_attn/o_proj/bias", f"{STORED}.attn.c_proj.bias", "D -> D"),
    Weight(f"{BLOCK}/mlp/up_proj/kernel", f"{STORED}.mlp.c_fc.weight", "D F -> D F"),
    Weight(f"{BLOCK}/mlp/up_proj/bias", f"{STORED}.mlp.c_fc.bias", "F -> F"),
    Weight(f"{BLOCK}/mlp/down_proj/kernel", f"{STORED}.mlp.c_proj.weight", "F D -> F D"),
    Weight(f"{BLOCK}/mlp/down_proj/bias", f"{STORED}.mlp.c_proj.bias", "D -> D"),
    *norm(f"{BLOCK}/input_layernorm", f"{STORED}.ln_1"),
    *norm(f"{BLOCK}/post_attention_layernorm", f"{STORED}.ln_2"),
    *norm("params/norm", "transformer.ln_f"),
    Weight("params/lm_head/embedding", "lm_head.weight", "V D -> V D"),
)
NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Fields of other decoders, and what this config calls them."""
DROPOUT = {
    "attention_dropout_rate": "attn_pdrop",
    "embedding_dropout_rate": "embd_pdrop",
    "dropout_rate": "resid_pdrop",
}
"""Rates of dropout, ours to the config's; a config that states none means 0.1."""
# Other heads; an order of the same product.
UNUSED = (
    "reorder_and_upcast_attn",
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
)


def translate(fields: Fields) -> dict[str, Any]:
    """Translate a `GPT2Config`."""
    norm = NormSpec(kind="layer", eps=fields.number("layer_norm_epsilon", 1e-5), bias=True, cast="after_scale")
    width, max_length = fields.count("n_embd"), fields.count("n_positions", 1024)
    attention = own_keys_of(fields, heads="n_head", width="n_embd", bias=True, out_bias=True)
    activation = fields.choice("activation_function", ACTIVATIONS, "gelu_new")
    mlp = MlpSpec(features=fields.count("n_inner", 4 * width), activation=activation, bias=True, gated=False)
    layer = LayerSpec(mixer=attention, mlp=mlp, norm=norm)
    scale = attention.logit_scale if fields.flag("scale_attn_weights", True) else 1.0
    by_depth, count = fields.flag("scale_attn_by_inverse_layer_idx", False), fields.count("n_layer")
    scales = [scale / (index + 1) if by_depth else scale for index in range(count)]
    arguments = {
        "vocab_size": fields.count("vocab_size"),
        "features": width,
        "layers": tuple(
            with_attention(layer, scale=None if each == layer.attention.logit_scale else each) for each in scales
        ),
        "norm": norm,
        "embedding": EmbeddingSpec(positions=max_length),
        "tie_embeddings": fields.flag("tie_word_embeddings", True),
        "max_length": max_length,
        **{ours: fields.rate(theirs, 0.1) for ours, theirs in DROPOUT.items()},
    }
    for name in UNUSED:
        fields.get(name, None)
    fields.finish({"n_ctx": (max_length,)})
    return arguments


def config_dict(module: CausalTransformer) -> dict[str, Any]:
    """Write a `GPT2Config`."""
    config = layer_config(module, activation="activation_function", eps="layer_norm_epsilon")
    if config["activation_function"] == "gelu_pytorch_tanh":
        config["activation_function"] = "gelu_new"  # the name that this family has for it
    written = {**model_config(module), **config}
    implied = ("head_dim", "num_key_value_heads", "attention_dropout")
    scales = [layer.attention.scale for layer in module.layers]
    first, plain = module.layers[0].attention.logit_scale, module.layers[0].attention.head_dim ** -0.5
    return {
        **{NAMES.get(name, name): value for name, value in written.items() if name not in implied},
        **{theirs: getattr(module, ours) for ours, theirs in DROPOUT.items()},
        "scale_attn_weights": first == plain,
        "scale_attn_by_inverse_layer_idx": any(scale != scales[0] for scale in scales),
    }


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    translate=translate,
    config_dict=config_dict,
    weights=WEIGHTS,
    ignorable=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
)
