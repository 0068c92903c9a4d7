"""A template cannot reach out of the sandbox, and whatever it does ends within its budget."""

import pytest

from dew.data.chat import ChatTemplate
from dew.data.template_budget import ChatTemplateError

MESSAGES = [{"role": "user", "content": "hi there"}]
DOUBLE = "{%% set ns = namespace(x='ab', y='ab') %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.x }}"
NEST = (
    "{%% set ns = namespace(a=[1], b=[1]) %%}{%% for i in range(60) %%}{%% set ns.a = [ns.a, ns.a] %%}"
    "{%% set ns.b = [ns.b, ns.b] %%}{%% endfor %%}%s"
)


def render(source):
    return ChatTemplate(source=source, special_tokens={"eos_token": "</s>"}).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        DOUBLE % "{% set ns.x = ns.x ~ ns.x %}",
        DOUBLE % "{% set ns.x = ns.x + ns.x %}",
        DOUBLE % "{% set ns.x = ns.x|replace('a', ns.x) %}",
        DOUBLE % "{% set ns.x = ns.x.replace('a', ns.x) %}",
        DOUBLE % "{% set ns.x = ns.x.join(ns.x) %}",
        DOUBLE % "{% set ns.x = ns.x|join(ns.x) %}",
        DOUBLE % "{% set ns.x = '%s%s' % (ns.x, ns.x) %}",
        DOUBLE % "{% set ns.x = '{0}{0}'.format(ns.x) %}",
        DOUBLE % "{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = t %}",
        "{{ 'x' * 10**9 }}",
        "{{ [1] * 10**10 }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set q = a %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ range(99999)|list|length }}{% endfor %}",
        "{% set a = range(99999)|list %}{% for i in range(99999) %}{% set x = a[::-1] %}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}" + "L" * 100_000 + "{% endfor %}{% endset %}",
        "{% macro f(n) %}{% if n > 1 %}{{ f(n - 1) }}{{ f(n - 2) }}{% endif %}{% endmacro %}{{ f(60) }}",
        NEST % "{{ ns.a }}",
        NEST % "{{ ns.a|tojson }}",
        NEST % "{{ ns.a == ns.b }}",
        NEST % "{{ ns.a is eq(ns.b) }}",
        NEST % "{{ [ns.a]|select('eq', ns.b)|list|length }}",
        NEST % "{{ [ns.a].index(ns.b) }}",
        "{{ 'a\n'|indent(999999999) }}",
        "{{ ('" + "a" * 50_000 + "'|replace('a', '" + "b" * 50_000 + "'))|length }}",
    ],
)
def test_growth_and_loops_end_within_the_budget(source):
    with pytest.raises(ChatTemplateError, match="units of work"):
        render(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update({}) }}", "unsafe"),
        ("{{ namespace(_x=1) }}", "may not hold the name '_x'"),
        ("{% include 'x' %}", "no loader"),
        ("{{ lipsum(9999) }}", "undefined"),
        ("{{ 1|pprint }}", "No filter named 'pprint'"),
        ("{% for x in y %}", "does not compile"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "does not compile"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ '%999999999d' % 1 }}", "formats with"),
        ("{{ '%*d' % (999999999, 1) }}", "formats with"),
        ("{{ '{:999999999d}'.format(1) }}", "formats with"),
        ("{{ '{:{}}'.format(1, 999999999) }}", "formats with"),
        ("{{ 'a'.ljust(999999999) }}", r"ljust\(\) is not available"),
        ("{{ [1]|tojson(indent=999999999) }}", "use 0 to 16"),
        ("{{ strftime_now('%99999999Y') }}", "plain % codes"),
        ("{{ 9 ** 9 ** 9 }}", "is refused in a chat template"),
        ("x" * 1_000_001, "has 1000001 characters"),
        ("{{ messages[0].content + 1 }}", "failed on this chat"),
    ],
)
def test_what_no_chat_needs_is_refused(source, message):
    with pytest.raises(ChatTemplateError, match=message):
        render(source)


def test_attributes_of_format_stay_closed():
    assert render("{{ '{0.__class__}'.format(1) }}") == ""
    assert render("{{ messages|attr('__class__') }}") == ""


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("{{ messages[0].content|upper ~ eos_token }}", "HI THERE</s>"),
        ("{{ '%s!%d' % ('a', 3) }}{{ '{}-{}'.format(1, 2) }}", "a!31-2"),
        ("{{ messages|map(attribute='role')|join(',') }}", "user"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}", "1"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}", "a=1"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for m in messages %}\n  {%- if loop.last %}!{% endif %}\n{% endfor %}", "!"),
        ("{{ {'b': ['é', none]}|tojson(indent=1) }}", '{\n "b": [\n  "é",\n  null\n ]\n}'),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ messages[::-1][0].content.split(' ')[1:]|first }}", "there"),
        ("{{ tools is none }}{{ missing }}{{ missing is defined }}", "TrueFalse"),
        ("{{ 'role' in messages[0] and 'i t' in messages[0]['content'] }}", "True"),
        ("{{ dict(a=1)['a'] + 2 ** 3 }}{{ '-' * 3 }}", "9---"),
        ("{% generation %}x{% endgeneration %}", "x"),
    ],
)
def test_what_chats_need_works(source, want):
    assert render(source) == want


def test_the_budget_grows_with_the_chat():
    template = ChatTemplate(source="{% for m in messages %}{{ m.role }}: {{ m.content|trim }}\n{% endfor %}")
    turns = [{"role": "user", "content": "x" * 2000}] * 3000
    assert len(template.render(turns)) == 3000 * 2007


def test_a_message_cannot_run_code():
    template = ChatTemplate(source="{{ messages[0].content }}")
    text = "{{ 1 + 1 }}{% raw %}"
    assert template.render([{"role": "user", "content": text}]) == text
