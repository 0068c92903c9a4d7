"""Make the small tokenizers that the tests compare with: `python tools/make_tokenizer_fixtures.py [directory]`.

Needs transformers, sentencepiece and tiktoken. A fixture is a directory as a checkpoint has it; `ids.json` holds what
transformers makes of every text of `texts.json`, `chats.json` what it makes of chats with each template.
"""

import base64
import io
import json
import sys
import tempfile
from pathlib import Path

import sentencepiece
import tiktoken
import tokenizers
import transformers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 3 o'clock, isn't it? They'll see 12345 foxes in 2024.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "for (int i = 0; i < 10; ++i) { total += values[i]; }  // sum of the values",
    "Größe und Maß: über Straßen fährt der Zug. L'été, où êtes-vous? El niño comió piñas.",
    "Привет, мир! Как дела? こんにちは世界。你好，世界。안녕하세요",
    "a    b\t\tc\n\n\nd  e   f    g the the then there",
]
TEXTS = [
    *("", " ", "  ", "   ", "\n", "\n\n", "\t", " \n ", "\r\n", "a", " a", "a ", "  a  ", "\u00a0", "\u3000x"),
    *("The quick brown fox", " The quick", "quick  brown", "the\nthen\n\nthere", "isn't it's they'll I'M WE'RE"),
    *("0", "7", "12", "123", "1234", "12345", "2024-01-31", "3.14159", "1,000,000", "x1y22z333", "½ ² ٣ 四"),
    *(
        "def f(x):\n    return x + 1\n",
        "if (a && b) { c[i] = *p; }",
        "<html><body>&amp;</body></html>",
        "$x^2_i$ \\frac{1}{2}",
    ),
    *(
        "    four",
        "\tone tab",
        "a\tb",
        "a    b",
        "trailing    ",
        "\n    \n",
        "x\n\n    y",
        "// comment",
        "#include <x.h>",
    ),
    *("é", "e\u0301", "Größe", "ñandú", "ÀÉÎÕÜ", "ſ", "ﬁ", "Ⅷ", "K", "Å", "µ", "İstanbul", "ß ẞ"),
    *("Привет", "你好，世界", "こんにちは", "안녕", "한글", "สวัสดี", "नमस्ते", "ελληνικά"),
    *("שלום עולם", "مرحبا", "\u202eabc\u202c", "abc \u200f שלום", "\u2066a\u2069"),
    *("🚂", "👨‍👩‍👧‍👦", "🇩🇪🇫🇷", "👍🏽", "☃️", "text🚂text", "🚂 🚂", "\U0001f9ff\U0010ffff"),
    *(
        "\x00",
        "a\x00b",
        "\x01\x02\x1b[0m",
        "\x7f",
        "\ufeffbom",
        "\u200b",
        "a\u200bb",
        "\u2028",
        "\x85",
        "\ufffd",
        "\ue000",
    ),
    *("<s>", "</s>", "<unk>", "a<s>b", " <s> ", "<s><s>", "<|im_start|>user\nhi<|im_end|>", "<|im_start|> x", "[INST]"),
    *(
        "<|endoftext|>",
        "<|endoftext|>x<|endoftext|>",
        "<tool>the</tool>",
        "<0x0A>",
        "▁",
        "▁▁the",
        "a▁b",
        "Ġthe",
        "<extra_1>",
    ),
    *("the" * 20, "a" * 50, " " * 33, "\n" * 9, "!?" * 12, "-" * 31, "=" * 8 + "\n", "ab" * 9 + " " + "cd" * 9),
]
CONTROL = ["<|im_start|>", "<|im_end|>"]
CHATS = {
    "one": [{"role": "user", "content": "  the fox? "}],
    "more": [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": "over the dog\n"},
        {"role": "user", "content": "then <b>\"there\"</b> & 'here'"},
    ],
    "system": [
        {"role": "system", "content": "be quick"},
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": "<think>a dog</think>\n\nthe dog"},
        {"role": "user", "content": "größe 🚂"},
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "count", "description": "counts <foxes> & dogs", "parameters": {"n": 1.5}},
    }
]


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def pieces(directory, kind, size, config, **options):
    """Train a SentencePiece model."""
    directory.mkdir(exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_writer=model,
        model_type=kind,
        vocab_size=size,
        character_coverage=1.0,
        minloglevel=2,
        **options,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    write_json(directory / "tokenizer_config.json", config)


def byte_pairs(size, special):
    """Train byte-level pairs; return the vocabulary and the merges."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(CORPUS * 2, trainer)
    state = json.loads(backend.to_str())["model"]
    return state["vocab"], [" ".join(pair) for pair in state["merges"]]


def merges(directory, special, config, **files):
    """Write vocab.json and merges.txt."""
    directory.mkdir(exist_ok=True)
    vocab, pairs = byte_pairs(340, special)
    write_json(directory / "vocab.json", vocab)
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n", encoding="utf-8")
    write_json(directory / "tokenizer_config.json", config)
    for name, value in files.items():
        write_json(directory / f"{name}.json", value)


def ranks(directory, config):
    """Write a file of base64 ranks, as tiktoken reads it."""
    directory.mkdir(exist_ok=True)
    vocab, _ = byte_pairs(340, [])
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
    lines = [
        f"{base64.b64encode(bytes(letters[letter] for letter in token)).decode()} {rank}"
        for token, rank in sorted(vocab.items(), key=lambda pair: pair[1])
    ]
    (directory / "tokenizer.model").write_text("\n".join(lines) + "\n")
    write_json(directory / "tokenizer_config.json", config)


def declared(first, *texts):
    return {str(first + n): {"content": text, "special": text.startswith("<|")} for n, text in enumerate(texts)}


def main(out):
    out.mkdir(parents=True, exist_ok=True)
    ends = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    llama = {**ends, "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}
    pair_options = {"byte_fallback": True, "remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    user = {"user_defined_symbols": ["<tool>", "    "], "control_symbols": CONTROL}
    pieces(out / "llama", "bpe", 420, {**llama, "legacy": False}, **pair_options)
    pieces(out / "llama_legacy", "bpe", 420, {**llama, "legacy": True}, **pair_options, **user)
    gemma = {**llama, "tokenizer_class": "GemmaTokenizer", "add_eos_token": True}
    pieces(out / "gemma", "bpe", 420, gemma, add_dummy_prefix=False, **pair_options, **user)
    plain = {**ends, "tokenizer_class": "PreTrainedTokenizerFast"}
    pieces(out / "pieces_bpe", "bpe", 420, plain, **pair_options, **user)
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:  # the built-in rules take 240 kB
        rules.write("FB01\t66 69\nBD\t31 2044 32\n3000\t20\n9\t20\nA\t20\n2167\t56 49 49 49\n")
        rules.flush()
        pieces(
            out / "unigram", "unigram", 240, plain, hard_vocab_limit=False, normalization_rule_tsv=rules.name, **user
        )
    gpt2 = {"tokenizer_class": "GPT2Tokenizer", **dict.fromkeys(ends, "<|endoftext|>"), "add_bos_token": False}
    merges(out / "gpt2", ["<|endoftext|>"], gpt2)
    named = {"bos_token": None, "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    merges(
        out / "qwen2",
        [],
        {"tokenizer_class": "Qwen2Tokenizer"},
        added_tokens={"<|endoftext|>": 340, "<|im_start|>": 341, "<|im_end|>": 342, "<tool>": 343},
        special_tokens_map={**named, "additional_special_tokens": CONTROL},
    )
    tokens = declared(340, "<|endoftext|>", *CONTROL, "<tool>")
    tokens["346"] = {"content": "<|eot_id|>", "special": True}
    eot = {"bos_token": "<|endoftext|>", "eos_token": "<|eot_id|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    ranks(out / "tiktoken", {**eot, "added_tokens_decoder": tokens, "add_bos_token": True, "add_eos_token": False})
    ids = {}
    for directory in sorted(path for path in out.iterdir() if path.is_dir() and path.name != "templates"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        ids[directory.name] = [tokenizer.encode(text) for text in TEXTS]
    check_independently(out, ids)
    write_json(out / "texts.json", TEXTS)
    write_json(out / "ids.json", ids)
    write_json(out / "chats.json", {"chats": CHATS, "tools": TOOLS, "texts": rendered(out)})
    versions = {
        library.__name__: library.__version__ for library in (transformers, tokenizers, sentencepiece, tiktoken)
    }
    write_json(out / "versions.json", versions)


def check_independently(out, ids):
    """Say where transformers and the format's own library differ, without special tokens in the text."""
    for name in ("pieces_bpe", "unigram", "llama", "llama_legacy", "gemma"):
        own = sentencepiece.SentencePieceProcessor(model_file=str(out / name / "tokenizer.model"))
        wrong = [
            text
            for text, got in zip(TEXTS, ids[name], strict=True)
            if [number for number in got if number not in (1, 2)] != own.encode(text)
        ]
        print(f"{name}: {len(wrong)} of {len(TEXTS)} differ from sentencepiece: {wrong[:12]}")


def rendered(out):
    """Text of every chat with every template."""
    found = {}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"<s>": 0, "</s>": 1}, merges=[]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")
    for path in sorted((out / "templates").glob("*.jinja")):
        for name, chat in CHATS.items():
            for prompt in (False, True):
                for tools in (None, TOOLS) if path.stem == "qwen" else (None,):
                    key = f"{path.stem} {name} {'prompt' if prompt else 'whole'}{' tools' if tools else ''}"
                    try:
                        found[key] = tokenizer.apply_chat_template(
                            chat,
                            chat_template=path.read_text(),
                            tokenize=False,
                            add_generation_prompt=prompt,
                            tools=tools,
                        )
                    except Exception as error:  # a template may refuse a chat
                        found[key] = None
                        print(f"{key}: refused: {error}")
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tests/fixtures/tokenizers"))
