"""How families store layers that predict further tokens: DeepSeek's behind the last layer, Qwen's under `mtp`.

Entry points: `PredictionTensors`, `DEEPSEEK_PREDICTION`, `qwen_prediction`; `prediction_of` and `prediction_depth` read
and write the number of them. Their blocks have the names of a family's other blocks.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dew.nn.backbones.causal_transformer import CausalTransformer, LayerSpec
from dew.nn.prediction import PredictionSpec
from dew.pretrained.families.fields import Fields
from dew.pretrained.recipe import Weight

_BLOCK, _STORED = "params/layers_{i}/", "model.layers.{i}."
_PATH = "params/prediction_{i}"
_PROJ = "O (S D) -> S D O"
LOAD_WITHOUT = (
    "Load without the layers that predict further tokens: prediction_layers=False, or --no-prediction-layers of a "
    "dew command."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionTensors:
    """How a family stores layers that predict further tokens.

    Attributes:
        field: Field of the config that counts them; one that does not state it has as many as published ones, 1.
        marker: End of the name of a tensor of the first one, from the number of the other layers.
        weights: Rules of their leaves, from the rules of the family, the number of the other layers and theirs.
        globs: All their tensors, from the same two numbers.
        copies: Copies of the token table and the head among them, each with the name of what it copies; from the model.
            They are not read, and written again.
    """

    field: str
    marker: Callable[[int], str]
    weights: Callable[[Sequence[Weight], int, int], tuple[Weight, ...]]
    globs: Callable[[int, int], tuple[str, ...]]
    copies: Callable[[CausalTransformer], Mapping[str, str]] = lambda module: {}

    def weights_of(self, family: Sequence[Weight], module: CausalTransformer) -> tuple[Weight, ...]:
        """Give the rules of a model's layers; none where it has no such.

        Args:
            family: The rules of its other leaves.
            module: The model.
        """
        return self.weights(family, len(module.layers), prediction_depth(module))

    def copies_of(self, module: CausalTransformer) -> Mapping[str, str]:
        """Name the copies in a checkpoint of a model; none where it has no such layers."""
        return self.copies(module) if module.prediction else {}


def prediction_depth(module: CausalTransformer) -> int:
    """Count the layers of a model that predict further tokens."""
    return module.prediction.depth if module.prediction else 0


def prediction_of(fields: Fields, field: str, layer: LayerSpec, *, is_shared: bool = False) -> dict[str, Any]:
    """Read how many there are, as an argument of `CausalTransformer`.

    Args:
        fields: The config.
        field: Field that counts them; a config without it has none.
        layer: Their block.
        is_shared: As `PredictionSpec`.
    """
    depth = fields.count(field, 0, least=0)
    return {"prediction": PredictionSpec(layer=layer, depth=depth, is_shared=is_shared) if depth else None}


def _block(family: Sequence[Weight], path: str, tensor: str) -> tuple[Weight, ...]:
    """Give the rules of a block under other names.

    Args:
        family: The rules of a family.
        path: What stands for `params/layers_{i}/`.
        tensor: What stands for `model.layers.{i}.`.
    """
    moved = []
    for weight in family:
        if weight.path.startswith(_BLOCK):
            fused = weight.fused and dataclasses.replace(
                weight.fused, parts=tuple(part.replace(_BLOCK, path) for part in weight.fused.parts)
            )
            names = {"path": weight.path.replace(_BLOCK, path), "tensor": weight.tensor.replace(_STORED, tensor)}
            moved.append(dataclasses.replace(weight, **names, fused=fused))
    return tuple(moved)


def _deepseek_weights(family: Sequence[Weight], layers: int, depth: int) -> tuple[Weight, ...]:
    found: list[Weight] = []
    for index in range(depth):
        path, tensor = f"params/prediction_{index}", f"model.layers.{layers + index}"
        found += [
            Weight(f"{path}/embedding_norm/scale", f"{tensor}.enorm.weight", "D -> D"),
            Weight(f"{path}/hidden_norm/scale", f"{tensor}.hnorm.weight", "D -> D"),
            Weight(f"{path}/proj/kernel", f"{tensor}.eh_proj.weight", _PROJ),
            Weight(f"{path}/norm/scale", f"{tensor}.shared_head.norm.weight", "D -> D"),
            *_block(family, f"{path}/block/", f"{tensor}."),
        ]
    return tuple(found)


def _deepseek_copies(module: CausalTransformer) -> dict[str, str]:
    table = "model.embed_tokens.weight"
    head = table if module.tie_embeddings else "lm_head.weight"
    tensors = [f"model.layers.{len(module.layers) + index}" for index in range(prediction_depth(module))]
    return {f"{tensor}.embed_tokens.weight": table for tensor in tensors} | {
        f"{tensor}.shared_head.head.weight": head for tensor in tensors
    }


DEEPSEEK_PREDICTION = PredictionTensors(
    field="num_nextn_predict_layers",
    marker=lambda layers: f"layers.{layers}.eh_proj.weight",
    weights=_deepseek_weights,
    globs=lambda layers, depth: tuple(f"model.layers.{layers + index}.*" for index in range(depth)),
    copies=_deepseek_copies,
)
_QWEN_ENDS = (
    Weight("params/prediction_0/embedding_norm/scale", "mtp.pre_fc_norm_embedding.weight", "D -> D"),
    Weight("params/prediction_0/hidden_norm/scale", "mtp.pre_fc_norm_hidden.weight", "D -> D"),
    Weight("params/prediction_0/proj/kernel", "mtp.fc.weight", _PROJ),
    Weight("params/prediction_0/norm/scale", "mtp.norm.weight", "D -> D"),
)


def qwen_prediction(field: str) -> PredictionTensors:
    """State Qwen's layers, which share norms and projection.

    Args:
        field: Field of the config that counts them.
    """
    return PredictionTensors(
        field=field,
        marker=lambda layers: "mtp.fc.weight",
        weights=lambda family, layers, depth: (*_QWEN_ENDS, *_block(family, f"{_PATH}/block/", "mtp.layers.{i}.")),
        globs=lambda layers, depth: ("mtp.*",),
    )
