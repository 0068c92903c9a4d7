"""Configs of larger models around that of a family here: Qwen3.5, whose text model stands beside layers for images.

Entry point: `language_config`.
"""

from typing import Any

from dew.pretrained.families.fields import Fields
from dew.pretrained.source import CheckpointError

LANGUAGE_MODELS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""`model_type` of a larger model, and that of the language model in its `text_config`."""
ON_EITHER_LEVEL = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
"""Fields about the language model that the outer config may state too, or alone."""
# About images and where their features replace tokens, which no text has.
OF_OTHER_PARTS = (
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    "language_model_only",
)


def language_config(config: dict[str, Any], where: object) -> dict[str, Any]:
    """Take the config of the language model out of that of a larger model.

    Args:
        config: The parsed config.json.
        where: The checkpoint, for errors.

    Returns:
        The config of the language model; any other config as it is.

    Raises:
        CheckpointError: If there is no such config inside, the two disagree, or a field around it is not known.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in LANGUAGE_MODELS:
        return config
    fields, wanted = Fields(config, where), LANGUAGE_MODELS[model_type]
    text = fields.get("text_config")
    if not isinstance(text, dict) or text.get("model_type", wanted) != wanted:
        raise CheckpointError(
            f"{where}: text_config must be the config of a {wanted}. Received: text_config={str(text)[:200]}"
        )
    for name in OF_OTHER_PARTS:
        fields.get(name, None)
    stated = {name: value for name in ON_EITHER_LEVEL if (value := fields.get(name, None)) is not None}
    for name, value in stated.items():
        if text.get(name) not in (None, value):
            raise CheckpointError(
                f"{where}: {name} is stated twice and differently; keep one of them. Received: {name}={value!r}, in "
                f"text_config {name}={text[name]!r}"
            )
    fields.finish()
    return {**text, **stated, "model_type": wanted}
