"""A tokenizer of bytes with a chat template, small enough for the tiny decoder."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from dew.data.text import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def byte_tokenizer(*, closes: bool = False) -> Tokenizer:
    """A token per byte, `<s>` and `</s>`; texts open with `<s>` and, where asked, close with `</s>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    single = "<s> $A </s>" if closes else "<s> $A"
    tokens = [("<s>", 256), ("</s>", 257)]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    return Tokenizer(backend=backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, chat_template=TEMPLATE)


CHAT = [{"role": "user", "content": "hi"}]
