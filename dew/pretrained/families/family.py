"""What a model family states about itself: names and arrangement of its weights, and its config in both directions.

Entry point: `Family`; the parts that Llama and its descendants share are `DECODER_WEIGHTS` and `IGNORABLE`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer
from dew.pretrained.families.fields import Fields
from dew.pretrained.families.prediction import PredictionTensors
from dew.pretrained.recipe import Weight
from dew.pretrained.source import TensorSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`.

    Attributes:
        model_type: Name in config.json.
        architecture: Class of the reference library that holds the language model.
        translate: Config to the arguments of `CausalTransformer`; refuses what it does not understand.
        config_dict: Model to config fields; raises ValueError for a model the config cannot express.
        weights: Rules of its weights, but those of `prediction`.
        ignorable: Globs of tensors that old exports carry and that hold no weight.
        unpacked: View of a checkpoint, which is named for errors, with packed tensors under the names of `weights`;
            None where the family packs none.
        left_out: Config to globs of tensors of layers that are not computed here and that the logits of a text do not
            depend on, each with what those layers do; a load says which it leaves out.
        prediction: How layers that predict further tokens are stored; None where the family has none.
    """

    model_type: str
    architecture: str
    translate: Callable[[Fields], dict[str, Any]]
    config_dict: Callable[[CausalTransformer], dict[str, Any]]
    weights: tuple[Weight, ...]
    ignorable: tuple[str, ...] = ()
    unpacked: Callable[[TensorSource, object], TensorSource] | None = None
    left_out: Callable[[Mapping[str, Any]], Mapping[str, str]] = lambda config: {}
    prediction: PredictionTensors | None = None

    def weights_of(self, module: CausalTransformer) -> tuple[Weight, ...]:
        """Give the rules of all weights of a model.

        Args:
            module: The model.
        """
        further = () if self.prediction is None else self.prediction.weights_of(self.weights, module)
        return (*self.weights, *further)


IGNORABLE = ("model.layers.*.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
_PROJECTIONS = (
    ("self_attn/q_proj", "(N H) D -> D N H", "(N H) -> N H"),
    ("self_attn/k_proj", "(K H) D -> D K H", "(K H) -> K H"),
    ("self_attn/v_proj", "(K H) D -> D K H", "(K H) -> K H"),
    ("self_attn/o_proj", "D (N H) -> N H D", "D -> D"),
    ("mlp/gate_proj", "F D -> D F", "F -> F"),
    ("mlp/up_proj", "F D -> D F", "F -> F"),
    ("mlp/down_proj", "D F -> F D", "D -> D"),
)
_NORMS = (
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    *("self_attn/q_norm", "self_attn/k_norm"),
)


def _decoder_weights() -> tuple[Weight, ...]:
    weights = [
        Weight("params/embed_tokens/embedding", "model.embed_tokens.weight", "V D -> V D"),
        Weight("params/norm/scale", "model.norm.weight", "D -> D"),
        Weight("params/norm/bias", "model.norm.bias", "D -> D"),
        Weight("params/lm_head/embedding", "lm_head.weight", "V D -> V D"),
    ]
    for name, kernel, bias in _PROJECTIONS:
        stored = f"model.layers.{{i}}.{name.replace('/', '.')}"
        weights.append(Weight(f"params/layers_{{i}}/{name}/kernel", f"{stored}.weight", kernel))
        weights.append(Weight(f"params/layers_{{i}}/{name}/bias", f"{stored}.bias", bias))
    for name in _NORMS:
        stored = f"model.layers.{{i}}.{name.replace('/', '.')}"
        weights.append(Weight(f"params/layers_{{i}}/{name}/scale", f"{stored}.weight", "D -> D"))
        weights.append(Weight(f"params/layers_{{i}}/{name}/bias", f"{stored}.bias", "D -> D"))
    return tuple(weights)


DECODER_WEIGHTS = _decoder_weights()


def decoder_weights_but(*own: Weight) -> tuple[Weight, ...]:
    """Give Llama's names, but for the leaves of these rules."""
    apart = {weight.path for weight in own}
    return (*own, *(weight for weight in DECODER_WEIGHTS if weight.path not in apart))


def linear(path: str, tensor: str, kernel: str) -> tuple[Weight, Weight]:
    """Name the kernel of a projection and its bias, which is stored along the same dimensions of the result.

    Args:
        path: Path of the projection in a block.
        tensor: Beginning of both names in the file.
        kernel: Arrangement of a kernel that is stored [out, in], as `"F D -> D F"`.
    """
    out = kernel.split(")")[0] + ")" if kernel.startswith("(") else kernel.split()[0]
    return (
        Weight(f"{path}/kernel", f"{tensor}.weight", kernel),
        Weight(f"{path}/bias", f"{tensor}.bias", f"{out} -> {out.strip('()')}"),
    )


def norm(path: str, tensor: str) -> tuple[Weight, Weight]:
    """Name the scale of a norm and its bias."""
    return Weight(f"{path}/scale", f"{tensor}.weight", "D -> D"), Weight(f"{path}/bias", f"{tensor}.bias", "D -> D")


def uniform(values: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Reduce what the layers of a model have to one value per field.

    Raises:
        ValueError: If the layers differ in a field that the config states once.
    """
    result = {}
    for name, each in values.items():
        if any(value != each[0] for value in each):
            raise ValueError(f"the config states {name} once for all layers. Received: {sorted(set(map(str, each)))}")
        result[name] = each[0]
    return result
