"""Which tokens of texts, prompts with responses, chats and token rows are kept and which are scored."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dew.data.text import Tokenizer
from dew.data.tokens import language_rows
from tests.data.vocabulary import metadata

TOKENIZER = Tokenizer.from_gguf(metadata())
TEXTS = ["the rain", "in the lane, then the train", "it's here: 31 trains"]


def documents(rows):
    """Read the documents back out of the rows, with the tokens that are scored."""
    found = []
    for tokens, segments, mask in zip(rows["tokens"], rows["segment_ids"], rows["loss_mask"], strict=True):
        for segment in range(1, segments.max() + 1):
            found.append((tokens[segments == segment].tolist(), tokens[(segments == segment) & mask].tolist()))
    return found


@pytest.mark.parametrize("packing", [False, True])
def test_texts_end_with_the_end_token_and_are_scored_after_their_first(packing):
    rows, report = language_rows(TEXTS, TOKENIZER, 63, packing)
    want = [[*TOKENIZER.encode(text), TOKENIZER.eos_id] for text in TEXTS]
    assert sorted(documents(rows)) == sorted((ids, ids[1:]) for ids in want)
    assert rows["tokens"].shape == (1 if packing else 3, 64)
    assert report.scored_tokens == sum(len(ids) - 1 for ids in want) == rows["loss_mask"].sum()
    assert (report.truncated_tokens, report.documents, report.tokens) == (0, 3, sum(map(len, want)))


def test_a_response_is_scored_with_its_end_token_and_its_prompt_is_not():
    inputs = {"prompts": ["the rain ", "in "], "responses": ["in the lane", "2 trains"]}
    rows, report = language_rows(inputs, TOKENIZER, 31)
    for (tokens, scored), prompt, response in zip(documents(rows), *inputs.values(), strict=True):
        answer = [*TOKENIZER.encode(response), TOKENIZER.eos_id]
        assert tokens == [*TOKENIZER.encode(prompt), *answer]
        assert scored == answer
    assert report.scored_tokens == rows["loss_mask"].sum()


def test_a_prompt_has_one_start_token_and_its_response_none():
    tokenizer = Tokenizer.from_gguf(metadata(add_bos_token=True))
    rows, _ = language_rows({"prompts": ["the"], "responses": ["rain"]}, tokenizer, 15)
    assert documents(rows)[0][0].count(tokenizer.bos_id) == 1


def test_chats_score_the_assistant_alone():
    chat = [{"role": "user", "content": "the rain?"}, {"role": "assistant", "content": "in the lane"}]
    rows, _ = language_rows([chat, chat], TOKENIZER, 127)
    assert documents(rows) == 2 * [
        (TOKENIZER.chat(chat, add_generation_prompt=False), [*TOKENIZER.encode("in the lane"), TOKENIZER.eos_id])
    ]
    alone, _ = language_rows(chat, TOKENIZER, 127)
    assert documents(alone) == documents(rows)[:1]


def test_what_is_cut_off_is_reported():
    ids = [TOKENIZER.encode(text) for text in TEXTS]
    rows, report = language_rows(TEXTS, TOKENIZER, 8)
    cut = [max(len(row) + 1 - 9, 0) for row in ids]
    assert report.truncated_tokens == sum(cut) > 0
    assert report.truncated_documents == sum(count > 0 for count in cut)
    assert report.scored_tokens == rows["loss_mask"].sum()
    assert str(report) == (
        f"3 documents in 3 rows, sequence length 8, packing off, {sum(cut)} tokens cut off "
        f"{report.truncated_documents} documents, {report.scored_tokens} scored tokens"
    )


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(2, 20))
@settings(max_examples=50, deadline=None)
def test_packed_texts_lose_nothing_and_predict_every_token_once(words, length):
    texts = ["train" * count for count in words]
    rows, report = language_rows(texts, TOKENIZER, length, packing=True)
    want = [[*TOKENIZER.encode(text), TOKENIZER.eos_id] for text in texts]
    scored = sorted(token for _, tokens in documents(rows) for token in tokens)
    assert scored == sorted(token for ids in want for token in ids[1:])
    assert (report.truncated_tokens, report.scored_tokens) == (0, len(scored))
    assert 0 <= report.padding_fraction < 1


def test_the_length_is_that_of_the_longest_document_within_the_context():
    longest = max(len(TOKENIZER.encode(text)) for text in TEXTS)
    _, report = language_rows(TEXTS, TOKENIZER)
    assert report.length % 16 == 0
    assert longest <= report.length < longest + 16
    assert report.truncated_tokens == 0
    assert language_rows(TEXTS, TOKENIZER, max_length=5)[1].length == 5


@pytest.mark.parametrize(
    "parts, max_length, length",
    [
        (1, 40, 16),
        (3, None, 48),
        (3, 40, 18),  # no multiple of 16: the next that divides
        (3, 17, 15),  # nothing longer within the context
        (64, 40, 16),  # nothing at all: refused where it is computed
    ],
)
def test_rows_get_a_length_that_fits(parts, max_length, length):
    def fits(size):
        return size % parts == 0

    longest = language_rows(["a b"], TOKENIZER, max_length=max_length, fits=fits)[1]
    assert longest.length == length
    assert language_rows(["a b"], TOKENIZER, 8, fits=fits)[1].length == 8  # a length that was asked for stays
    with pytest.raises(ValueError, match="sequence length 9 exceeds the model's context of 8"):
        language_rows(TEXTS, TOKENIZER, 9, max_length=8)


def test_token_rows_pass_through():
    tokens = np.arange(12, dtype=np.int64).reshape(2, 6)
    rows, report = language_rows(tokens)
    assert rows["tokens"].dtype == np.int32
    assert np.array_equal(rows["tokens"], tokens)
    assert (report.length, report.scored_tokens) == (5, 10)
    segments = np.array([[1, 1, 1, 2, 2, 0]] * 2)
    mask = np.array([[1, 1, 0, 1, 1, 1]] * 2)
    rows, report = language_rows({"tokens": tokens, "segment_ids": segments, "loss_mask": mask})
    assert rows["loss_mask"].dtype == bool
    assert (report.scored_tokens, report.tokens) == (2 * 2, 2 * 5)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ([], ValueError, "There is no data"),
        ({"prompts": [], "responses": []}, ValueError, "There is no data"),
        ({"prompts": ["a"], "responses": []}, ValueError, "1 prompts, 0 responses"),
        ({"prompts": "a", "responses": ["b"]}, TypeError, "'prompts' is a list of texts"),
        ({"prompts": ["a"]}, ValueError, r"Received: \['prompts'\]"),
        (["a", 3], TypeError, "not mixed. Received: a list of int, str"),
        (7, TypeError, "Received: int"),
        (np.zeros((0, 4), int), ValueError, r"shape=\(0, 4\)"),
        (np.zeros((2, 1), int), ValueError, r"shape=\(2, 1\)"),
        (np.zeros((2, 4)), ValueError, "dtype=float64"),
        (np.zeros(4, int), ValueError, r"shape=\(4,\)"),
        (
            {"tokens": np.zeros((2, 4), int), "loss_mask": np.zeros((2, 3))},
            ValueError,
            "'loss_mask' must have the shape",
        ),
        ({"tokens": np.zeros((2, 4), int), "text": 1}, ValueError, "Received also: text"),
        ([""], ValueError, "None of the 1 documents has a token to score"),
    ],
)
def test_wrong_inputs_are_named(inputs, error, message):
    with pytest.raises(error, match=message):
        language_rows(inputs, TOKENIZER, max_length=64)


def test_texts_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match="need a tokenizer"):
        language_rows(TEXTS)
