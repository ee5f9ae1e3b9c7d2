import datetime
from decimal import Decimal

import pytest

from batchgen.errors import RowError, SpecError
from batchgen.text.prompt_template import PromptTemplate, compile_value
from batchgen.text.sandbox import Bounds

ROW = {
    "q": "What is {{ 7 * 7 }}? {% if",
    "gap": None,
    "n": 7,
    "f": 0.5,
    "choices": ["a", None, "b"],
    "meta": {"title": "T", "author": None},
    "blob": b"\x00",
    "amount": Decimal("1.10"),
    "day": datetime.date(2025, 1, 31),
}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Q: {{ q }}\n", "Q: What is {{ 7 * 7 }}? {% if\n"),
        ("no template", "no template"),
        ("{{ n }} {{ f }} {{ amount }} {{ day }}", "7 0.5 1.10 2025-01-31"),
        ("{{ gap or 'nothing' }}", "nothing"),
        ("{{ gap | default('x', true) }}", "x"),
        ("{% if gap is none %}null{% endif %}", "null"),
        ("{{ q if gap is none else gap }}", ROW["q"]),
        ("{% for c in choices if c %}{{ loop.index }}{{ c }} {% endfor %}", "1a 2b "),
        ("{{ meta.title }}{{ meta['title'] }}{{ choices[0] }}", "TTa"),
        ("{{ meta | tojson }}", '{"title": "T", "author": null}'),
        ("{% set x = q | upper %}{{ x[:4] }}", "WHAT"),
        ("{% raw %}{{ x }}{% endraw %}<&>", "{{ x }}<&>"),
        ("{% if n %}\nyes\n{% endif %}\nend\n", "yes\nend\n"),
    ],
)
def test_render(source, expected):
    assert PromptTemplate(source).render(ROW) == expected


def test_columns():
    template = PromptTemplate(
        "{{ a }}{% for x in b.c %}{{ x }}{{ loop.index }}{% endfor %}{% if d is defined %}{% endif %}"
    )
    assert template.columns == {"a", "b", "d"}
    assert PromptTemplate("{% set x = range(3) %}{{ x }}").columns == set()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ gap }}", "gap"),
        ("a {{ meta.author }}", "meta.author"),
        ("{{ choices[1] }}", r"choices\[1\]"),
        ("{{ choices | join(', ') }}", r"choices\[1\]"),
        ("{{ 'a' ~ gap }}", "gap"),
        ("{{ gap | upper }}", "gap"),
        ("{{ gap | trim | length }}", "gap"),
        ("{{ gap if n else q }}", "gap"),
        ("{% for c in choices %}{{ c }}{% endfor %}", "c"),
    ],
)
def test_nulls_are_named(source, name):
    with pytest.raises(RowError, match=rf"^input\.prompt: {name} is null") as caught:
        PromptTemplate(source, "input.prompt").render(ROW)
    assert caught.value.code == "prompt_missing"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ absent }}", "'absent' is undefined"),
        ("{{ meta.absent }}", "no attribute 'absent'"),
        ("{{ blob }}", "blob is binary"),
        ("{{ raise_exception('bad row') }}", "bad row"),
        ("{{ q.__class__ }}", "unsafe"),
        ("{{ strftime_now('%Y') }}", "undefined"),
        ("{{ lipsum() }}", "undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_failing_rows(source, message):
    with pytest.raises(RowError, match=message) as caught:
        PromptTemplate(source).render(ROW)
    assert caught.value.code == "template_error"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{{ q", r"input\.prompt, line 2"),
        ("{% if q %}", r"input\.prompt, line 1"),
        ("{{ q | nope }}", "No filter named 'nope'"),
        ("{{ choices | random }}", "No filter named 'random'"),
    ],
)
def test_syntax_errors(source, message):
    for make in (PromptTemplate, compile_value):
        with pytest.raises(SpecError, match=message) as caught:
            make(source, "input.prompt")
        assert "\n" not in str(caught.value)


def test_bounded():
    template = PromptTemplate("{% for i in range(99999) %}{{ q }}{% endfor %}", bounds=Bounds(max_chars=1000))
    with pytest.raises(RowError, match="longer than 1,000") as caught:
        template.render(ROW)
    assert caught.value.code == "template_error"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ n }}", 7),
        ("{{n}}", 7),
        ("{{ f }}", 0.5),
        ("{{ gap }}", None),
        ("{{ choices }}", ["a", None, "b"]),
        ("{{ q }}", ROW["q"]),
        ("{{ n * 2 }}", 14),
        ("{{ gap | default(3, true) }}", 3),
        ("{{ meta.author }}", None),
        ("{{ n }}{{ n }}", "77"),
        (" {{ n }}", " 7"),
        ("0.5", "0.5"),
        ("", ""),
    ],
)
def test_values_keep_their_type(source, expected):
    value = compile_value(source).evaluate(ROW)
    assert value == expected and type(value) is type(expected)


def test_value_columns_and_errors():
    assert compile_value("{{ n + m }}").columns == {"n", "m"}
    assert compile_value("{{ n }}").columns == {"n"}
    assert compile_value("seven").columns == set()
    for source in ("{{ absent }}", "{{ gap.x }}", "{{ n + gap }}", "{{ 2 ** 10000000 }}"):
        with pytest.raises(RowError, match=r"sampling\.seed") as caught:
            compile_value(source, "sampling.seed").evaluate(ROW)
        assert caught.value.code == "template_error"
    with pytest.raises(RowError) as caught:
        compile_value("{{ gap }}!").evaluate(ROW)
    assert caught.value.code == "prompt_missing"


def test_a_column_with_the_name_of_a_function_is_a_column_unless_it_is_called():
    row = {"range": "5 km", "dict": "a book", "namespace": "x", "raise_exception": "y"}
    for name, text in row.items():
        template = PromptTemplate("{{ " + name + " }}")
        assert template.columns == {name}
        assert template.render(row) == text
        assert compile_value("{{ " + name + " }}").evaluate(row) == text
    called = PromptTemplate("{% for i in range(2) %}{{ i }}{% endfor %}")
    assert called.columns == frozenset() and called.render(row) == "01"


def test_self_cannot_be_a_column():
    with pytest.raises(SpecError, match="'self' means the template itself"):
        PromptTemplate("Say {{ self }}")
