"""The vocabulary formats that checkpoints are published in besides GGUF, each read into a `tokenizers.Tokenizer`."""

from dew.data.tokenizers.directory import SLOW_TOKENIZER_FILES, has_tokenizer, read_backend

__all__ = ["SLOW_TOKENIZER_FILES", "has_tokenizer", "read_backend"]
