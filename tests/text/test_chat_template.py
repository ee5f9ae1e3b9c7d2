import json
import time
from datetime import datetime
from pathlib import Path

import pytest

from batchgen.errors import ModelError, RowError
from batchgen.text.chat_template import ChatTemplate
from batchgen.text.sandbox import Bounds

FOLDER = Path(__file__).parent.parent / "data" / "text" / "templates"
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
HELLO = [{"role": "user", "content": "Hello"}]


def render(source, messages=HELLO, tools=None, **options):
    return ChatTemplate(source, "<s>", "</s>", **options).render(messages, tools)


@pytest.mark.parametrize("conversation", EXPECTED["conversations"])
@pytest.mark.parametrize("name", EXPECTED["templates"])
def test_expected_texts(name, conversation):
    entry = EXPECTED["templates"][name]
    source = (FOLDER / name).read_bytes().decode()
    now = datetime.fromisoformat(EXPECTED["now"])
    template = ChatTemplate(source, entry["bos_token"], entry["eos_token"], lambda: now)
    expected = entry["renders"][conversation]
    if "error" not in expected:
        assert template.render(EXPECTED["conversations"][conversation]) == expected["text"]
        return
    with pytest.raises(RowError) as caught:
        template.render(EXPECTED["conversations"][conversation])
    assert caught.value.code == "template_error" and expected["error"] in caught.value.message


def test_all_expectations_are_there():
    assert sum(len(entry["renders"]) for entry in EXPECTED["templates"].values()) == 36


def test_tools_and_prompt_switch():
    source = "{{ bos_token }}{% for t in tools %}{{ t.name }};{% endfor %}{{ 'go' if add_generation_prompt }}"
    template = ChatTemplate(source, "<s>", None)
    assert template.render(HELLO, [{"name": "f"}, {"name": "g"}]) == "<s>f;g;go"
    assert template.render(HELLO, [], add_generation_prompt=False) == "<s>"


def test_a_token_that_is_none_is_undefined():
    source = "{{ bos_token is defined }}{{ eos_token is defined }}"
    assert ChatTemplate(source, None, "</s>").render(HELLO) == "FalseTrue"


def test_tojson_is_plain_json():
    assert render('{{ {"b": "<é>&\'", "a": [1, none]} | tojson }}') == '{"b": "<é>&\'", "a": [1, null]}'
    assert render('{{ {"b": 1, "a": 2} | tojson(indent=1, sort_keys=true) }}') == '{\n "a": 2,\n "b": 1\n}'
    assert render("{{ 'é' | tojson(ensure_ascii=true) }}") == '"\\u00e9"'


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hello!"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% break %}{% endfor %}", "0"),
        ("{% for i in range(9) %}{% if i < 7 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "78"),
        ("{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) ~ f('a') ~ none }}", "[1][a]None"),
        ("{% for x in [1, [2, 3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% for x in [1, 2] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}", "1/2False 2/2True "),
        ("{% for x in [] %}{% else %}none{% endfor %}{% for x in nothing %}{% endfor %}", "none"),
        ("{% set x | upper %}a{% endset %}{{ x }}{% set y %}b{% endset %}{{ y }}", "Ab"),
        ("{{ 'a' | center(5) }}{{ 'x\ny' | indent(2) }}{{ [1, 2, 3] | batch(2) | list }}", "  a  x\n  y[[1, 2], [3]]"),
        ("{{ '%s-%03d' % ('a', 7) }}{{ 2 ** 5 }}{{ 'ab' * 2 }}", "a-00732abab"),
        ("{%- if true %}\n  yes\n  {%- endif %}\n", "  yes"),
    ],
)
def test_what_templates_use(source, expected):
    assert render(source) == expected


def test_dates():
    now = datetime(2025, 1, 31)
    assert render("{{ strftime_now('%d %B %Y') }}", now=lambda: now) == "31 January 2025"


def test_text_is_not_rendered_again():
    content = "{{ 7 * 7 }}{% if x %}"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == content


def test_broken_templates_are_the_models_fault():
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("a\n{% if %}", None, None)
    with pytest.raises(ModelError, match="No filter named 'nope'"):
        ChatTemplate("{{ x | nope }}", None, None)
    with pytest.raises(ModelError, match="too deeply"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", None, None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('No system role') }}", "No system role"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update({}) }}", "unsafe"),
        ("{{ nothing.attribute }}", "undefined"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_failing_renderings(source, message):
    with pytest.raises(RowError, match=message) as caught:
        render(source)
    assert caught.value.code == "template_error"


DOUBLING = "{%% set ns = namespace(s='ab') %%}{%% for i in range(200) %%}%s{%% endfor %%}{{ ns.s | length }}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% set r = range(1000) %}{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * [0] }}",
        "{{ 2 ** 10000000000 }}",
        "{{ 'a' | center(100000000000) }}",
        "{{ 'a' | indent(100000000000, first=true) }}",
        "{{ 'a'.rjust(100000000000) }}",
        DOUBLING % "{% set ns.s = ns.s ~ ns.s %}",
        DOUBLING % "{% set ns.s = ns.s + ns.s %}",
        DOUBLING % "{% set ns.s = [ns.s, ns.s] | join %}",
        DOUBLING % "{% set ns.s = ns.s.replace('a', ns.s) %}",
        DOUBLING % "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}",
        "{% set ns = namespace(s=3) %}{% for i in range(100) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
    ],
)
def test_bounded(source):
    template = ChatTemplate(source, None, None, bounds=Bounds(max_steps=50_000, max_chars=100_000))
    start = time.monotonic()
    with pytest.raises(RowError) as caught:
        template.render(HELLO)
    assert caught.value.code == "template_error"
    assert time.monotonic() - start < 5


def test_bounded_in_time():
    source = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(source, None, None, bounds=Bounds(max_steps=10**12, max_seconds=0.1))
    with pytest.raises(RowError, match=r"more than 0\.1 seconds"):
        template.render(HELLO)


def test_bounds_count_one_rendering():
    template = ChatTemplate("{% for i in range(90) %}{% endfor %}", None, None, bounds=Bounds(max_steps=100))
    assert [template.render(HELLO) for _ in range(5)] == [""] * 5


def test_long_conversations_are_within_bounds():
    source = (FOLDER / "Qwen-Qwen3-0.6B.jinja").read_text(encoding="utf-8")
    messages = [{"role": role, "content": "x" * 2000} for _ in range(500) for role in ("user", "assistant")]
    assert len(ChatTemplate(source, None, None).render(messages)) > 2_000_000
