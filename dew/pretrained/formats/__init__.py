"""How one file format names and arranges the weights of an architecture.

`GGUF_ARCHITECTURES` lists the architectures read from GGUF files; each module there offers `config`, `tensor_name` and
`row_order`.
"""

from types import ModuleType

from dew.pretrained.formats import gguf_llama

GGUF_ARCHITECTURES: dict[str, ModuleType] = {"llama": gguf_llama}

__all__ = ["GGUF_ARCHITECTURES"]
