"""Where the reference fixtures are, and writers of small files that break one rule of a format."""

import json
import pathlib
import struct

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "granitemoehybrid_experts", "gpt_oss")
LATENT = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3")
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
NAMES = (
    *("llama", "llama_untied", "qwen3", "qwen3_untied", "mistral", "qwen2", "gemma", "gemma2", "gemma3_text"),
    *("smollm3", "olmo2", "olmo3", "granite", "phi3"),
    *("gpt_neox", "gpt2", "starcoder2", "cohere2", "glm4"),
    *("mamba2", "bamba", "granitemoehybrid"),
    *SPARSE,
    *LATENT,
    *DELTA,
)
UNTIED = (
    *("llama_untied", "qwen3_untied", "mistral", "olmo2", "olmo3", "phi3", "gpt_neox", "glm4", "mamba2", "bamba"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe_text"),
    *LATENT,
)


def safetensors_bytes(header, data=b"", length=None):
    """A safetensors file with this header (a dict, or bytes as they are) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def read_header(path):
    """The header of a safetensors file and its data."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def everything_in(directory):
    """Names and contents of all files below a directory, to show that nothing was changed."""
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
