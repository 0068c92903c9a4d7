"""The kind that goes in comes out; limits and end tokens are settled by one rule each."""

import numpy as np
import pytest

from dew.inference.requests import Prompts, continuation, stop_ids, token_budgets
from tests.inference.tiny_text import CHAT, byte_tokenizer


def test_texts_give_texts():
    tokenizer = byte_tokenizer()
    prompts = Prompts.of(["ab", "c"], tokenizer)
    new = [tokenizer.encode(" d", add_special_tokens=False), [*tokenizer.encode("e", add_special_tokens=False), 257]]
    assert [len(ids) for ids in prompts.ids] == [3, 2]
    assert prompts.restore(new, tokenizer) == ["ab d", "ce"]
    assert prompts.restore(new, tokenizer, strip_prompt=True) == [" d", "e"]
    assert Prompts.of("ab", tokenizer).restore(new[:1], tokenizer) == "ab d"


def test_a_chat_gives_its_reply():
    tokenizer = byte_tokenizer()
    prompts = Prompts.of(CHAT, tokenizer)
    assert prompts.ids[0] == tuple(tokenizer.chat(CHAT))
    assert tokenizer.decode(prompts.ids[0], skip_special_tokens=False) == "<s>user:hi</s><s>assistant:"
    reply = [*tokenizer.encode("ok", add_special_tokens=False), 257]
    assert prompts.restore([reply], tokenizer) == "ok"
    assert Prompts.of([CHAT, CHAT], tokenizer).restore([reply, reply], tokenizer) == ["ok", "ok"]


@pytest.mark.parametrize("inputs", [[[1, 2], [3]], (np.array([1, 2]), [3])], ids=["lists", "arrays"])
def test_ids_give_ids(inputs):
    prompts = Prompts.of(inputs, None)
    assert prompts.ids == ((1, 2), (3,))
    assert prompts.restore([[7], [8, 9]], None) == [[1, 2, 7], [3, 8, 9]]
    assert prompts.restore([[7], [8, 9]], None, strip_prompt=True) == [[7], [8, 9]]
    assert Prompts.of([1, 2], None).restore([[7]], None) == [1, 2, 7]
    assert Prompts.of(np.array([[1, 2], [3, 4]]), None).ids == ((1, 2), (3, 4))


def test_a_text_prompt_stays_open():
    tokenizer = byte_tokenizer(closes=True)
    assert tokenizer.encode("a")[-1] == 257
    assert Prompts.of("a", tokenizer).ids == (tuple(tokenizer.encode("a")[:-1]),)


def test_what_follows_is_decoded_in_its_context():
    tokenizer = byte_tokenizer()
    snowman = tokenizer.encode("☃", add_special_tokens=False)
    assert continuation(tokenizer.encode("a"), snowman, tokenizer) == "☃"
    # Ids of rows that only pad the model's table have no text.
    assert continuation(tokenizer.encode("a"), [*snowman, 299], tokenizer) == "☃"


@pytest.mark.parametrize(
    "inputs, error, message",
    [
        ([], ValueError, "at least one prompt"),
        (3.5, TypeError, "Give a string, a chat, a list of token ids.*Received: float"),
        (["a", [1]], TypeError, "must all be strings, all chats or all lists of ids. Received: list, str"),
        ([["a"]], TypeError, "must all be strings"),
        ([True], TypeError, "must all be strings"),
    ],
)
def test_other_kinds_are_refused(inputs, error, message):
    with pytest.raises(error, match=message):
        Prompts.of(inputs, byte_tokenizer())


@pytest.mark.parametrize("inputs", ["a", CHAT])
def test_text_without_a_tokenizer_is_refused(inputs):
    with pytest.raises(ValueError, match=r"without a tokenizer.*Give lists of ids"):
        Prompts.of(inputs, None)


def budgets(lengths, **options):
    given = {"max_length": None, "max_new_tokens": None, "context": 100, "generation_config": {}} | options
    return token_budgets([[1] * length for length in lengths], **given)


def test_budgets_count_from_the_limit_that_was_given():
    assert budgets([5, 9], max_new_tokens=7) == [7, 7]
    assert budgets([5, 9], max_length=20) == [15, 11]
    assert budgets([5, 9]) == [95, 91]
    assert budgets([5, 9], context=5000) == [1019, 1015]
    assert budgets([1024], context=5000) == [3976]
    assert budgets([5, 98], generation_config={"max_new_tokens": 8}) == [8, 2]
    assert budgets([5, 28, 40], generation_config={"max_length": 30}) == [25, 2, 1]
    assert budgets([5], generation_config={"max_length": 4096}) == [95]
    assert budgets([5], generation_config={"max_length": 30, "max_new_tokens": 8}) == [8]
    assert budgets([5], max_new_tokens=3, generation_config={"max_new_tokens": 8}) == [3]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_length": 20, "max_new_tokens": 2}, "not both. Received: max_length=20, max_new_tokens=2"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 or more"),
        ({"max_new_tokens": 1.5}, "a whole number. Received: max_new_tokens=1.5"),
        ({"max_length": 9}, "a prompt has 9 tokens already"),
        ({"max_length": 101}, "max_length=101 exceeds the model's context of 100"),
    ],
)
def test_limits_that_leave_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        budgets([5, 9], **options)


def test_stop_ids():
    tokenizer = byte_tokenizer()
    assert stop_ids("auto", tokenizer, {}) == (257,)
    assert stop_ids("auto", tokenizer, {"eos_token_id": [5, 257]}) == (257, 5)
    assert stop_ids("auto", None, {"eos_token_id": 5}) == (5,)
    assert stop_ids([], tokenizer, {}) == stop_ids(None, tokenizer, {}) == ()
    assert stop_ids([4, 4, 3], None, {}) == (4, 3)
    with pytest.raises(ValueError, match="needs a tokenizer or a checkpoint that names its end token"):
        stop_ids("auto", None, {})
    with pytest.raises(ValueError, match=r"must be 'auto', None or a list of ids. Received: stop_token_ids='end'"):
        stop_ids("end", tokenizer, {})
    for given in (5, [1.5], [True]):
        with pytest.raises(ValueError, match=r"a list of ids\. Received"):
            stop_ids(given, tokenizer, {})
