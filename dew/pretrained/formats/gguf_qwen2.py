"""GGUF files of the `qwen2` architecture: Qwen 1.5, 2 and 2.5, the dense models."""

from typing import Any

from dew.pretrained.formats.architecture import GgufArchitecture, GgufFields, decoder_fields, pop_implied_head_dim


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to a `Qwen2Config`."""
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **decoder_fields(fields)}
    pop_implied_head_dim(fields, config)
    fields.finish()
    return {**config, "hidden_act": "silu", "use_sliding_window": False}


ARCHITECTURE = GgufArchitecture(name="qwen2", translate=translate)
