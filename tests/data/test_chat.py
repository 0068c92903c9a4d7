"""Where the answers lie in a rendered chat, for the shapes of template that checkpoints ship."""

import pytest

from dew.data.chat import ChatTemplate, check_messages, is_chat
from dew.data.template_budget import ChatTemplateError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": " two\n"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "two"},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content.strip() }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set c = m.content.split('</think>')[-1] %}"
    "{% if loop.last %}<think></think>{% endif %}{{ c }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOCKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content|upper + eos_token }}"
    "{% endgeneration %}{% else %}Q:{{ m.content }}{% endif %}{% endfor %}"
)
OPEN_END = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def answers(source, turns=TURNS):
    closing = frozenset(["</s>", "<|im_end|>", "<|im_start|>", "<|user|>", "<|assistant|>"])
    template = ChatTemplate(source=source, special_tokens=SPECIAL, closing_tokens=closing)
    text, spans = template.assistant_spans(turns)
    assert text == template.render(turns)
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("source", "want"),
    [
        (CHATML, [" two\n<|im_end|>", "two<|im_end|>"]),
        (INSTRUCT, [" two </s>", " two </s>"]),
        (REASONING, [" two\n<|im_end|>", "<think></think>two<|im_end|>"]),
        (BLOCKS, [" TWO\n</s>", "TWO</s>"]),
        (OPEN_END, [" two\n", "two"]),
    ],
    ids=["chatml", "instruct", "reasoning", "generation blocks", "no end token"],
)
def test_spans_cover_what_the_model_writes(source, want):
    assert answers(source) == want


def test_cut_reasoning_is_scored_as_it_is_printed():
    turns = [TURNS[0], {"role": "assistant", "content": "<think>hm</think>two"}]
    assert answers(REASONING, turns) == ["<think></think>two<|im_end|>"]


def test_an_empty_answer_scores_its_end_token():
    assert answers(CHATML, [TURNS[0], {"role": "assistant", "content": ""}]) == ["<|im_end|>"]


def test_a_chat_without_answers_has_no_spans():
    assert answers(CHATML, TURNS[:1]) == []


def test_an_answer_that_the_template_rewrites_is_refused():
    with pytest.raises(ChatTemplateError, match="its tokens cannot be scored"):
        answers("{% for m in messages %}{{ m.content|length }}{% endfor %}")
    with pytest.raises(ChatTemplateError, match="prints 0 of 2 assistant contents"):
        answers("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")


def test_the_template_may_refuse_a_chat():
    with pytest.raises(ChatTemplateError, match="refuses this chat: no system"):
        ChatTemplate(source="{{ raise_exception('no system') }}").render(TURNS)


def test_further_keys_of_a_message_reach_the_template():
    template = ChatTemplate(source="{% for m in messages %}{{ m.name }}:{{ m.tags|tojson }}{% endfor %}")
    assert template.render([{**TURNS[0], "name": "Ada", "tags": ("é", None, True)}]) == 'Ada:["é", null, true]'


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ([], ValueError, "at least one message"),
        ("hello", TypeError, "A chat is a list"),
        ({"role": "user"}, TypeError, "A chat is a list"),
        (["hello"], TypeError, "Message 0 of a chat must be a dict. Received: 'hello'"),
        ([{"role": "user"}], ValueError, "Message 0 of a chat needs text under 'content'. Received: content=None"),
        ([{"content": "x"}], ValueError, "needs text under 'role'"),
        ([{"role": "user", "content": ["x"]}], ValueError, r"content=\['x'\]"),
        ([{"role": "user", "content": "x", "when": object()}], TypeError, "JSON values only"),
    ],
)
def test_malformed_chats_are_refused(messages, error, message):
    with pytest.raises(error, match=message):
        check_messages(messages)


def test_noncharacters_are_refused_where_answers_are_looked_for():
    with pytest.raises(ValueError, match=r"U\+FDD0"):
        answers(CHATML, [{"role": "user", "content": "a\ufdd0b"}])


def test_only_lists_of_messages_are_chats():
    assert is_chat(TURNS)
    assert not any(map(is_chat, ([], "text", [TURNS], {"role": "user"}, ["text"])))


@pytest.mark.reference
@pytest.mark.parametrize("source", [CHATML, INSTRUCT, REASONING, BLOCKS, OPEN_END])
def test_texts_equal_those_of_transformers(source):
    from transformers.utils.chat_template_utils import render_jinja_template

    for turns in (TURNS, TURNS[:3], TURNS[:1]):
        for prompt in (False, True):
            rendered, _ = render_jinja_template([turns], chat_template=source, add_generation_prompt=prompt, **SPECIAL)
            ours = ChatTemplate(source=source, special_tokens=SPECIAL).render(turns, add_generation_prompt=prompt)
            assert ours == rendered[0]
