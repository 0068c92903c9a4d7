"""A tokenizer of single characters and a decoder for it, small enough for every test."""

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from dew.data import Tokenizer
from tests.tiny import tiny_decoder

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,!?"
SPECIAL = ("<pad>", "</s>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer():
    """Build the tokenizer: ids 0 to 3 are special."""
    vocab = {text: number for number, text in enumerate([*SPECIAL, *CHARACTERS])}
    backend = Backend(models.BPE(vocab, [], unk_token="<pad>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return Tokenizer(
        backend=backend, special_tokens={"eos_token": "</s>", "pad_token": "<pad>"}, chat_template=TEMPLATE
    )


def tiny_language_module(**overrides):
    """Build the decoder; its table has rows that no character uses."""
    return tiny_decoder(num_layers=2, **overrides)
