"""The model families that checkpoints are read and written in.

`FAMILIES` is the explicit index: a new family is one file here and one line in it.
"""

from typing import Any

from dew.pretrained.families import (
    bamba,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    gemma,
    gemma2,
    gemma3,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    granitemoe,
    granitemoehybrid,
    llama,
    mamba2,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    smollm3,
    starcoder2,
)
from dew.pretrained.families.family import Family
from dew.pretrained.source import CheckpointError
from dew.tree import closest

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (
        *(llama, qwen3, mistral, qwen2, gemma, gemma2, gemma3, smollm3, olmo2, olmo3, granite, phi3),
        *(gpt_neox, gpt2, starcoder2, cohere2, glm4),
        *(mixtral, qwen3_moe, qwen2_moe, granitemoe, gpt_oss),
        *(mamba2, bamba, granitemoehybrid),
        *(deepseek_v2, deepseek_v3),
        *(qwen3_next, qwen3_5, qwen3_5_moe),
    )
}


def family_of(config: dict[str, Any], where: object) -> Family:
    """Find the family of a config.

    Raises:
        CheckpointError: If `model_type` is absent or not known, with the list and the nearest name.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    near = closest(model_type, FAMILIES) if isinstance(model_type, str) else None
    raise CheckpointError(
        f"{where}: model_type={model_type!r} is not supported. Known: {', '.join(FAMILIES)}."
        + (f" The nearest is {near!r}." if near else "")
    )


__all__ = ["FAMILIES", "Family", "family_of"]
