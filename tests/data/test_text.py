"""Ids equal the definition of byte-pair encoding; special tokens come once; chats mark the answers."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.data.text import Tokenizer
from tests.data.vocabulary import SPECIAL, metadata, slow_ids

FIELDS = metadata()
TOKENIZER = Tokenizer.from_gguf(FIELDS)
CHAT = [
    {"role": "user", "content": "is the train here?"},
    {"role": "assistant", "content": "the train is in the lane."},
    {"role": "user", "content": "and the rain?"},
    {"role": "assistant", "content": "it's 31 lanes: ünder way 🚂"},
]


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.sampled_from("\n\t"), max_size=40))
@settings(max_examples=200, deadline=None)
def test_ids_follow_the_definition_of_byte_pair_encoding(text):
    if any(token in text for token in SPECIAL):
        return
    assert TOKENIZER.encode(text) == list(slow_ids(text, FIELDS))


def test_digits_are_single_tokens():
    assert TOKENIZER.encode("x 2031 31") == [
        *TOKENIZER.encode("x"),
        *TOKENIZER.encode(" "),
        *[TOKENIZER.encode(digit)[0] for digit in "2031"],
        *TOKENIZER.encode(" "),
        *[TOKENIZER.encode(digit)[0] for digit in "31"],
    ]


@given(st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_decoding_gives_the_text_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_recognised_in_text():
    ids = TOKENIZER.encode("<|im_start|>the<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert TOKENIZER.decode(ids) == "the"


@pytest.mark.parametrize("text", ["the rain", "<|im_start|>the rain"])
def test_a_text_receives_one_start_token(text):
    tokenizer = Tokenizer.from_gguf(metadata(add_bos_token=True))
    ids = tokenizer.encode(text)
    assert ids.count(tokenizer.bos_id) == 1
    assert ids[0] == tokenizer.bos_id
    assert ids[1:] == tokenizer.encode("the rain", add_special_tokens=False)


def test_a_chat_takes_its_special_tokens_from_the_template_alone():
    tokenizer = Tokenizer.from_gguf(metadata(add_bos_token=True))
    ids = tokenizer.chat(CHAT[:1])
    assert ids == TOKENIZER.encode(TOKENIZER.chat_text(CHAT[:1]))
    assert ids.count(1) == 3  # system, user and the opened turn


def test_the_mask_covers_the_answers_and_their_end_tokens_and_nothing_else():
    ids, mask = TOKENIZER.chat_mask(CHAT)
    assert ids == TOKENIZER.chat(CHAT, add_generation_prompt=False)
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1)
    scored = [[ids[place] for place in run] for run in runs if mask[run[0]]]
    assert scored == [[*TOKENIZER.encode(CHAT[turn]["content"]), TOKENIZER.eos_id] for turn in (1, 3)]


def test_generation_starts_exactly_where_scoring_starts():
    ids, mask = TOKENIZER.chat_mask(CHAT[:2])
    assert ids[: mask.index(True)] == TOKENIZER.chat(CHAT[:1])


def test_saving_and_reading_keeps_every_id(tmp_path):
    TOKENIZER.save(tmp_path)
    again = Tokenizer.from_directory(tmp_path)
    assert again.vocab_hash() == TOKENIZER.vocab_hash()
    assert (again.bos_id, again.eos_id, again.pad_id, again.stop_ids) == (1, 2, 2, (2,))
    assert again.chat_mask(CHAT) == TOKENIZER.chat_mask(CHAT)
    assert again.config["model_max_length"] == 128


def test_the_hash_tells_tokenizers_apart():
    assert TOKENIZER.vocab_hash() != Tokenizer.from_gguf(metadata(pre="gpt-2")).vocab_hash()


def test_templates_are_found_in_each_place_a_checkpoint_may_keep_them(tmp_path):
    TOKENIZER.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    assert Tokenizer.from_directory(tmp_path).chat_template is None
    for template in ("{{ 1 }}", [{"name": "rag", "template": "{{ 2 }}"}, {"name": "default", "template": "{{ 1 }}"}]):
        path.write_text(json.dumps({**config, "chat_template": template}))
        assert Tokenizer.from_directory(tmp_path).chat_text(CHAT) == "1"
    (tmp_path / "chat_template.jinja").write_text("{{ 3 }}")
    assert Tokenizer.from_directory(tmp_path).chat_text(CHAT) == "3"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"model": "bert"}, "is 'bert'; 'gpt2' .* and 'llama' .* are read"),
        ({"pre": "smollmm"}, "'smollmm'; known are .*gpt-2, llama-bpe, .*qwen2, .*smollm"),
        ({"merges": ["t qq"]}, "'t qq', which does not join two tokens"),
        ({"merges": ["the"]}, "'the', which does not join two tokens"),
        ({"token_type": [1, 1]}, "token_type has 2 entries"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000, outside the vocabulary"),
        ({"tokens": ["a", "a"]}, "repeats 1 of its 2 tokens"),
    ],
)
def test_damaged_metadata_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(metadata(**changes))


def test_a_directory_without_a_readable_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3')
    with pytest.raises(ValueError, match="is not a readable tokenizer"):
        Tokenizer.from_directory(tmp_path)


def test_files_of_two_models_are_refused(tmp_path):
    TOKENIZER.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ValueError, match="eos_token is '</s>', which is not in its vocabulary"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        Tokenizer.from_directory(tmp_path)


def test_wrong_inputs_are_refused():
    with pytest.raises(TypeError, match=r"must be a str\. Received: int 3"):
        TOKENIZER.encode(3)
    size = TOKENIZER.vocab_size
    with pytest.raises(ValueError, match=rf"lie in \[0, {size}\)\. Received: {size}"):
        TOKENIZER.decode([size])
    bare = metadata()
    del bare["tokenizer.chat_template"]
    with pytest.raises(ValueError, match="has no chat template"):
        Tokenizer.from_gguf(bare).chat(CHAT)


@pytest.mark.reference
@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_transformers_reads_what_is_saved_and_gives_the_same_ids(pre, tmp_path):
    import transformers

    tokenizer = Tokenizer.from_gguf(metadata(pre=pre))
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the rain 123", "  x\n\n y", "<|im_start|>they're", "ünder 🚂 ½"):
        assert theirs.encode(text) == tokenizer.encode(text)
    assert theirs.apply_chat_template(CHAT, return_dict=False) == tokenizer.chat(CHAT, add_generation_prompt=False)
    want = theirs.apply_chat_template(CHAT[:3], add_generation_prompt=True, return_dict=False)
    assert want == tokenizer.chat(CHAT[:3])


@pytest.mark.weights
def test_the_published_model_has_its_published_ids(smollm2_file):
    from dew.pretrained import describe

    tokenizer = describe(smollm2_file).tokenizer
    # From transformers 5.24 on the published tokenizer.json.
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    text = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'
    want = [1604, 3987, 46477, 24, 94, 727, 472, 1620, 14362, 260, 304, 29, 373, 24681, 46477, 1230, 7996, 198]
    assert tokenizer.encode(text) == want
    assert tokenizer.decode([2, 198, 1, 520, 9531], skip_special_tokens=False) == "<|im_end|>\n<|im_start|>assistant"
    assert tokenizer.encode(" 2018-01") == [216, 34, 32, 33, 40, 29, 32, 33]
