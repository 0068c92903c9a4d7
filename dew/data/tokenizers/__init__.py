"""The vocabulary formats that checkpoints are published in besides GGUF, each read into a `tokenizers.Tokenizer`."""
