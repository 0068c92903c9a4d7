"""GGUF files of the `gemma` architecture: Gemma 1. The file holds every scale plus one."""

from typing import Any

from dew.pretrained.formats.architecture import GgufArchitecture, GgufFields, decoder_fields

SHIFTED = ("*norm.weight",)


def translate(fields: GgufFields) -> dict[str, Any]:
    """Translate the metadata to a `GemmaConfig`."""
    config = {
        "model_type": "gemma",
        "architectures": ["GemmaForCausalLM"],
        **decoder_fields(fields, head_dim=256),
        "hidden_activation": "gelu_pytorch_tanh",
    }
    fields.finish()
    return config


ARCHITECTURE = GgufArchitecture(name="gemma", translate=translate, shifted=SHIFTED)
