"""How one file format names and arranges the weights of an architecture.

`GGUF_ARCHITECTURES` is the explicit index of those read from GGUF files: a new one is one file here and one line in it.
"""

from dew.pretrained.formats import gguf_llama, gguf_qwen2, gguf_qwen3
from dew.pretrained.formats.architecture import GgufArchitecture

GGUF_ARCHITECTURES: dict[str, GgufArchitecture] = {
    module.ARCHITECTURE.name: module.ARCHITECTURE for module in (gguf_llama, gguf_qwen2, gguf_qwen3)
}

__all__ = ["GGUF_ARCHITECTURES"]
