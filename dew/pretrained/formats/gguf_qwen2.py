"""GGUF files of the `qwen2` architecture: Qwen 1.5, 2 and 2.5, the dense models."""

from typing import Any

from dew.pretrained.formats.architecture import GgufArchitecture, GgufFields, decoder_fields
from dew.pretrained.source import CheckpointError


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to a `Qwen2Config`."""
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **decoder_fields(fields)}
    head_dim = config.pop("head_dim")
    if head_dim * config["num_attention_heads"] != config["hidden_size"]:
        raise CheckpointError(
            f"{fields.where}: heads of {head_dim} are not the width {config['hidden_size']} divided by "
            f"{config['num_attention_heads']}, which a Qwen2 config cannot express."
        )
    fields.finish()
    return {**config, "hidden_act": "silu", "use_sliding_window": False}


ARCHITECTURE = GgufArchitecture(name="qwen2", translate=translate)
