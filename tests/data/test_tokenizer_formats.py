"""Each vocabulary format gives the ids of transformers on awkward texts, chats its text, and damage is an error."""

import base64
import json
import pathlib
import shutil

import pytest

from dew.data.chat import ChatTemplate
from dew.data.text import Tokenizer
from dew.data.tokenizers.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, parse_model

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures" / "tokenizers"
TEXTS = json.loads((FIXTURES / "texts.json").read_text(encoding="utf-8"))
IDS = json.loads((FIXTURES / "ids.json").read_text())
CHATS = json.loads((FIXTURES / "chats.json").read_text(encoding="utf-8"))
NAMES = sorted(IDS)


@pytest.fixture(scope="module")
def read():
    """Read a fixture once."""
    found = {}

    def tokenizer(name):
        if name not in found:
            found[name] = Tokenizer.from_directory(FIXTURES / name)
        return found[name]

    return tokenizer


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_transformers(read, name):
    assert len(TEXTS) > 100
    got = read(name).encode_batch(TEXTS)
    wrong = {text: (ours, want) for text, ours, want in zip(TEXTS, got, IDS[name], strict=True) if ours != want}
    # A text that writes the start token itself gets no second one; transformers gives it two.
    bos = read(name).bos_id
    doubled = {text for text, (ours, want) in wrong.items() if want == [bos, *ours] and ours[0] == bos}
    assert {text: pair for text, pair in wrong.items() if text not in doubled} == {}
    assert all(text.startswith(read(name).special_tokens["bos_token"]) for text in doubled)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_tokenizer_gives_the_same_ids(read, name, tmp_path):
    read(name).save(tmp_path)
    again = Tokenizer.from_directory(tmp_path)
    assert again.encode_batch(TEXTS) == read(name).encode_batch(TEXTS)
    assert again.special_tokens == read(name).special_tokens
    assert again.vocab_hash() == read(name).vocab_hash()


@pytest.mark.parametrize("name", ["llama", "gemma", "pieces_bpe"])
def test_pieces_decode_to_the_text(read, name):
    for text in TEXTS:
        if not any(token in text for token in ("<", "▁")):
            ids = read(name).encode(text)
            # Llama's own tokenizer reads a space at the start as the one that it adds.
            assert read(name).decode(ids) == (text.removeprefix(" ") if name == "llama" else text)


@pytest.mark.parametrize("key", sorted(CHATS["texts"]))
def test_chats_are_written_as_transformers_writes_them(key):
    name, chat, prompt, *tools = key.split()
    source = (FIXTURES / "templates" / f"{name}.jinja").read_text()
    template = ChatTemplate(source=source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    options = {"add_generation_prompt": prompt == "prompt", "tools": CHATS["tools"] if tools else None}
    want = CHATS["texts"][key]
    if want is None:
        with pytest.raises(ValueError, match="no system turn"):
            template.render(CHATS["chats"][chat], **options)
    else:
        assert template.render(CHATS["chats"][chat], **options) == want


@pytest.fixture
def copied(tmp_path):
    def copy(name, **config):
        directory = tmp_path / name
        shutil.copytree(FIXTURES / name, directory)
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        return directory

    return copy


def test_one_start_token_whoever_adds_it(copied, read):
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = Tokenizer.from_directory(copied("llama", chat_template=template))
    bos = tokenizer.bos_id
    chat = [{"role": "user", "content": "the fox"}]
    assert tokenizer.encode("the fox").count(bos) == 1
    assert tokenizer.chat(chat).count(bos) == 1
    assert tokenizer.encode(tokenizer.chat_text(chat)) == tokenizer.chat(chat)


@pytest.mark.parametrize("bos, eos", [(True, True), (True, False), (False, True), (False, False), (None, None)])
def test_the_config_says_what_is_put_around_a_text(copied, bos, eos, tmp_path):
    config = {"add_bos_token": bos, "add_eos_token": eos}
    tokenizer = Tokenizer.from_directory(copied("llama", **config))
    ids = tokenizer.encode("the fox")
    assert (ids[0] == tokenizer.bos_id, ids[-1] == tokenizer.eos_id) == (bool(bos), bool(eos))
    tokenizer.save(tmp_path)
    assert Tokenizer.from_directory(tmp_path).encode("the fox") == ids, "also beside a tokenizer.json"


def test_tools_take_the_template_for_tools(copied, tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    tokenizer = Tokenizer.from_directory(copied("gpt2", chat_template=named))
    chat = [{"role": "user", "content": "x"}]
    assert (tokenizer.chat_text(chat), tokenizer.chat_text(chat, tools=[{"name": "count"}])) == ("plain", "count")
    tokenizer.save(tmp_path)
    again = Tokenizer.from_directory(tmp_path)
    assert (again.chat_template, again.named_templates) == (tokenizer.chat_template, tokenizer.named_templates)
    with pytest.raises(TypeError, match=r"JSON values only\. Received: object"):
        tokenizer.chat_text(chat, tools=[object()])


def test_pieces_of_a_gguf_file_are_those_of_the_model(read):
    model = parse_model((FIXTURES / "pieces_bpe" / "tokenizer.model").read_bytes(), "the model")
    assert {kind for _, _, kind in model.pieces} >= {NORMAL, UNKNOWN, CONTROL, BYTE}
    texts, scores, kinds = (list(column) for column in zip(*model.pieces, strict=True))
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert Tokenizer.from_gguf(metadata).encode_batch(TEXTS) == read("pieces_bpe").encode_batch(TEXTS)
    started = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.add_bos_token": True})
    assert started.encode("the fox") == [1, *read("pieces_bpe").encode("the fox")]
    with pytest.raises(ValueError, match=r"must be of one length\. Received: 420, 3 and 420"):
        Tokenizer.from_gguf({**metadata, "tokenizer.ggml.scores": [0.0] * 3})


def field(number, kind, payload):
    return bytes([number << 3 | kind]) + payload


def piece(text=b"a", score=b"\0\0\0\0", kind=1):
    body = field(1, 2, bytes([len(text)]) + text) + field(2, 5, score) + field(3, 0, bytes([kind]))
    return field(1, 2, bytes([len(body)]) + body)


BROKEN_MODELS = {
    "nothing": (b"", "holds no pieces"),
    "text": (b"nonsense, not protobuf", "is not a SentencePiece model"),
    "an endless number": (field(1, 0, b"\xff" * 11), "has no end"),
    "a cut number": (b"\x0a\xff", "a number is cut off"),
    "a length past the end": (b"\x0a\xff\xff\xff\xff\x0f" + b"a", "asks for 4294967295 bytes"),
    "a group": (b"\x0b", "wire type 3"),
    "a number for a piece": (field(1, 0, b"\x05"), "stores a piece as int"),
    "not UTF-8": (piece(b"\xff"), "is not UTF-8"),
    "an endless score": (piece() + piece(b"b", b"\0\0\x80\x7f"), "score inf"),
    "an unknown kind": (piece(kind=9), "kind 9"),
    "a piece twice": (piece() * 2, "repeats 1 of its pieces"),
    "an unknown algorithm": (piece() + field(2, 2, b"\x02" + field(3, 0, b"\x04")), "has model type 4"),
    "no bytes": (piece() + field(2, 2, b"\x05" + field(3, 0, b"\x02") + b"\x98\x02\x01"), "no piece <0x00>"),
    "a charsmap of nonsense": (
        piece() + field(3, 2, b"\x05" + field(2, 2, b"\x03abc")),
        "damaged precompiled_charsmap",
    ),
}


@pytest.mark.parametrize("name", BROKEN_MODELS)
def test_a_broken_model_is_refused_by_its_rule(tmp_path, name):
    content, message = BROKEN_MODELS[name]
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_directory(tmp_path)


def line(token, rank):
    return base64.b64encode(token).decode() + f" {rank}\n"


BYTES = "".join(line(bytes([byte]), byte) for byte in range(256))


@pytest.mark.parametrize(
    "lines, message",
    [
        (line(b"a", 0), "has no token for the byte 0"),
        (BYTES + line(b"ab", 300), "must rank its 257 tokens"),
        (BYTES + line(b"a", 256), "line 257: a token has 1 to 512 bytes and one line"),
        (BYTES + "!!! 256\n", "line 257: expected 'base64 rank'"),
        (BYTES + "YQ== many\n", "line 257: expected 'base64 rank'"),
        (BYTES + line(b"a" * 600, 256), "a token has 1 to 512 bytes"),
    ],
)
def test_broken_ranks_are_refused(tmp_path, lines, message):
    (tmp_path / "tokenizer.model").write_text(lines)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("qwen2", {"added_tokens.json": {"<|new|>": 999}}, r"declares the token '<\|new\|>' with id 999, but .* 340"),
        ("qwen2", {"added_tokens.json": {"<|new|>": "many"}}, "must be a whole number. Received: 'many'"),
        ("qwen2", {"added_tokens.json": [1]}, "must hold a JSON object"),
        ("qwen2", {"special_tokens_map.json": {"eos_token": 3}}, "eos_token must be a text.* Received: '3'"),
        ("qwen2", {"special_tokens_map.json": {"pad_token": "[PAD]"}}, r"pad_token is '\[PAD\]', which is not in its"),
        ("qwen2", {"special_tokens_map.json": {"additional_special_tokens": "x"}}, "must be a list. Received: 'x'"),
        ("gpt2", {"vocab.json": {"a": 0, "b": 0}}, "a whole number of its own. Received: one id twice"),
        ("gpt2", {"vocab.json": {"a": "0"}}, "a whole number of its own"),
        ("gpt2", {"vocab.json": {"a": 0}}, "which does not join two tokens into a third"),
        ("gpt2", {"tokenizer_config.json": {"tokenizer_class": "BertTokenizer"}}, "'BertTokenizer' is not supported"),
        ("gpt2", {"tokenizer_config.json": {"add_bos_token": "yes"}}, "add_bos_token must be true or false"),
        ("gpt2", {"tokenizer_config.json": {"added_tokens_decoder": [1]}}, "must be an object. Received: list"),
        ("gpt2", {"tokenizer_config.json": {"added_tokens_decoder": {"1": {}}}}, "added token 1 has no 'content'"),
        ("gpt2", {"tokenizer_config.json": {"chat_template": 3}}, "chat_template must be a text"),
        ("gpt2", {"tokenizer_config.json": {"chat_template": [{"name": "x"}]}}, "chat_template must be a text"),
    ],
)
def test_files_that_do_not_fit_are_refused(copied, name, changes, message):
    directory = copied(name)
    for file_name, value in changes.items():
        (directory / file_name).write_text(json.dumps(value))
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_directory(directory)
