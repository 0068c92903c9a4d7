"""How one file format names and arranges the weights of an architecture.

`GGUF_ARCHITECTURES` is the explicit index of those read from GGUF files: a new one is one file here and one line in it.
"""

from dew.pretrained.formats import (
    gguf_cohere2,
    gguf_gemma,
    gguf_gemma2,
    gguf_gemma3,
    gguf_glm4,
    gguf_gpt2,
    gguf_gptneox,
    gguf_granite,
    gguf_llama,
    gguf_olmo2,
    gguf_phi3,
    gguf_qwen2,
    gguf_qwen3,
    gguf_smollm3,
    gguf_starcoder2,
)
from dew.pretrained.formats.architecture import GgufArchitecture

_MODULES = (
    *(gguf_llama, gguf_qwen2, gguf_qwen3, gguf_gemma, gguf_gemma2, gguf_gemma3),
    *(gguf_phi3, gguf_olmo2, gguf_granite, gguf_smollm3),
    *(gguf_gptneox, gguf_gpt2, gguf_starcoder2, gguf_cohere2, gguf_glm4),
)
GGUF_ARCHITECTURES: dict[str, GgufArchitecture] = {module.ARCHITECTURE.name: module.ARCHITECTURE for module in _MODULES}

__all__ = ["GGUF_ARCHITECTURES"]
