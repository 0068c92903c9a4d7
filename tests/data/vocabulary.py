"""A small byte-level vocabulary as GGUF metadata, and a slow reading of byte-pair merging to compare with."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXT = (
    "the rain in the lane, then the train: 2 trains and 31 lanes; it's raining, isn't it? they're here, in the rain. "
)


def metadata(**changes: Any) -> dict[str, Any]:
    """Train a tiny vocabulary and write it the way a GGUF file holds it.

    Args:
        **changes: `tokenizer.ggml.*` keys to set, or to drop where None.
    """
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    trained.train_from_iterator([TEXT * 3], trainer)
    model = trained.model.__getstate__().decode()
    vocab, merges = _parts(model)
    tokens = [token for token, _ in sorted(vocab.items(), key=lambda pair: pair[1])]
    fields = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "padding_token_id": 2,
        "add_bos_token": False,
    } | changes
    found = {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}
    return {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "tokenizer.chat_template": TEMPLATE,
        **found,
    }


def _parts(model: str) -> tuple[dict[str, int], list[str]]:
    state = json.loads(model)
    return state["vocab"], [" ".join(merge) if isinstance(merge, list) else merge for merge in state["merges"]]


def byte_letters() -> dict[int, str]:
    """The printable letter of each byte, as GPT-2 chose them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + number) for number, byte in enumerate(others)}


def slow_ids(text: str, fields: dict[str, Any]) -> Iterator[int]:
    """Encode ASCII text by the definition: cut digits, cut words, then merge the best pair again and again."""
    ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(fields["tokenizer.ggml.merges"])}
    numbers = {token: number for number, token in enumerate(fields["tokenizer.ggml.tokens"])}
    letters = byte_letters()
    words = r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|[0-9]|\s+(?!\S)|\s+"
    pieces = (word for part in re.findall(r"[0-9]|[^0-9]+", text) for word in re.findall(words, part))
    for piece in pieces:
        parts = [letters[byte] for byte in piece.encode()]
        while len(parts) > 1:
            pairs = [
                (ranks.get((left, right), len(ranks)), at) for at, (left, right) in enumerate(itertools.pairwise(parts))
            ]
            rank, at = min(pairs)
            if rank == len(ranks):
                break
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        yield from (numbers[part] for part in parts)
