"""Templates that take time or memory without end, or reach for what is none of their business."""

import resource
import time

import pytest

from batchgen.errors import ModelError, RowError, SpecError
from batchgen.text.chat_template import ChatTemplate
from batchgen.text.prompt_template import PromptTemplate, compile_value
from batchgen.text.sandbox import MAX_SOURCE, Bounds

BIG = "{% set b = 'a' * 1000000 %}"
LAUGHS = "{% set a = [1] * 1000 %}{% set a = [a] * 1000 %}{% set a = [a] * 1000 %}"
TUPLES = "{% set n = namespace(t=(1, 2)) %}{% for i in range(60) %}{% set n.t = (n.t, n.t) %}{% endfor %}"

WITHOUT_END = {
    "a width in a format": "{{ '%09999999999d' | format(1) }}",
    "a width in %": "{{ '%09999999999d' % 1 }}",
    "a width in a field": "{{ '{:9999999999}'.format(1) }}",
    "a width beside a field": "{{ '{:{w}}'.format(1, w=9999999999) }}",
    "a width in a mapping": "{{ '{a:9999999999}'.format_map({'a': 1}) }}",
    "a width by a star": "{{ '%*d' % (9999999999, 1) }}",
    "a field that comes often": BIG + "{{ ('{0}' * 1000000).format(b) }}",
    "replacing everything": BIG + "{{ b | replace('a', b) }}",
    "replacing nothing": BIG + "{{ b.replace('', b) }}",
    "joining": BIG + "{{ ([b] * 1000000) | join }}",
    "joining with much": BIG + "{{ range(100000) | join(b) }}",
    "joining what is mapped": BIG + "{{ range(100000) | map('string') | join(b) }}",
    "joining by a method": BIG + "{{ b.join([''] * 1000000) }}",
    "a text taken apart": "{{ ('ж' * 16000000) | list }}",
    "a text split": "{{ ('ж ' * 8000000).split(' ') }}",
    "translating": BIG + "{{ b.translate({97: b}) }}",
    "indenting by a text": BIG + "{{ ('\\n' * 1000000) | indent(b, blank=true) }}",
    "indenting by a number": "{{ ('\\n' * 1000000) | indent(1000000, blank=true) }}",
    "wrapping": BIG + "{{ ('a ' * 1000000) | wordwrap(1, wrapstring=b) }}",
    "padding one by one": "{{ range(100000) | map('center', 1000000) | list | length }}",
    "JSON that is indented": "{{ ([0] * 1000000) | tojson(indent=1000000) }}",
    "lists in lists, written": LAUGHS + "{{ a }}",
    "lists in lists, joined": LAUGHS + "{{ a ~ '' }}",
    "lists in lists, as JSON": LAUGHS + "{{ a | tojson }}",
    "lists in lists, compared": LAUGHS + "{{ a == a[1:] }}",
    "lists in lists, formatted": LAUGHS + "{{ '%s' % a }}",
    "tuples in tuples, hashed": TUPLES + "{{ {n.t: 1} }}",
    "adding lists": "{{ ([[1] * 1000] * 1000) | sum(start=[]) }}",
    "bytes of a number": "{{ (1).to_bytes(99999999999, 'big') }}",
    "filters that are mapped": "{{ range(100000) | map('upper') | map('lower') | list * 999999 }}",
    "tests that are mapped": BIG
    + "{% set r = range(100000) | list %}{% for i in r %}{{ r | select('in', r) | list }}{% endfor %}",
    "made-up words": "{{ lipsum(n=100000000) }}",
    "one's own block": "{% block a %}{{ self.a() }}{% endblock %}",
}


@pytest.mark.parametrize("source", WITHOUT_END.values(), ids=WITHOUT_END)
def test_renderings_without_end(source: str) -> None:
    begun, before = time.perf_counter(), peak()
    with pytest.raises(RowError) as caught:
        ChatTemplate(source, None, None, bounds=Bounds(max_seconds=1)).render([{"role": "user", "content": "x"}])
    assert caught.value.code == "template_error" and "MemoryError" not in caught.value.message
    assert time.perf_counter() - begun < 6 and peak() - before < 400 << 10


def peak() -> int:
    """KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


FORBIDDEN = [
    "{{ q.__class__ }}",
    "{{ q['__class__'] }}",
    "{{ q | attr('__class__') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format(q) }}",
    "{{ '{a.__class__}'.format_map({'a': q}) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(q) }}",
    "{{ ('{0.__class__}' | attr('format'))(q) }}",
    "{{ ['{0.__class__}'] | map('format', q) | map(attribute='__class__') | map('upper') | list }}",
    "{{ [q] | selectattr('__class__') | list }}",
    "{% import 'os' as os %}{{ os }}",
    "{% include '/etc/passwd' %}",
    "{% extends q %}",
]


@pytest.mark.parametrize("source", FORBIDDEN)
def test_what_is_out_of_reach(source: str) -> None:
    try:
        text = PromptTemplate(source).render({"q": "x"})
    except RowError as error:
        assert error.code == "template_error"
    else:
        assert "class" not in text.replace("{0.__class__}", "").lower() and "type" not in text


NOT_COMPILED = {
    "deep loops": "{% for i in [1] %}" * 25 + "{% endfor %}" * 25,
    "deep conditions": "{% if 1 %}" * 150 + "{% endif %}" * 150,
    "deeper conditions": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "deep lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "a long sum": "{{ " + "1 + " * 5000 + "1 }}",
    "a long number": "{{ " + "9" * 5000 + " }}",
    "a parameter twice": "{% macro f(a, a) %}{% endmacro %}",
    "a keyword twice": "{{ dict(a=1, a=2) }}",
    "a long text": "x" * (MAX_SOURCE + 1),
}


@pytest.mark.parametrize("source", NOT_COMPILED.values(), ids=NOT_COMPILED)
def test_sources_that_cannot_be_compiled(source: str) -> None:
    begun = time.perf_counter()
    for make in (PromptTemplate, compile_value):
        with pytest.raises(SpecError, match=r"^input\.prompt: (nested too deeply|not valid|longer than)"):
            make(source, "input.prompt")
    with pytest.raises(ModelError, match=r"chat template is (nested too deeply|not valid|longer than)"):
        ChatTemplate(source, None, None)
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '%5d|%-4s|%05.1f' % (42, 'ab', 3.14159) }}", "   42|ab  |003.1"),
        ("{{ '{:>6}|{a}'.format('x', a=[1, 2]) }}", "     x|[1, 2]"),
        ("{{ range(5) | map('string') | join(', ') }}", "0, 1, 2, 3, 4"),
        ("{{ ['a\\nb', 'c'] | join('-') | indent(2) }}", "a\n  b-c"),
        ("{{ 'abab'.replace('a', 'xyz') ~ [1, (2,)] ~ {'k': 'v'} }}", "xyzbxyzb[1, (2,)]{'k': 'v'}"),
        ("{{ [3, 1, 2] | sort | first }}{{ [1, 2] | sum }}{{ [1] + [2] }}{{ (1, 2) * 2 }}", "13[1, 2](1, 2, 1, 2)"),
        ("{{ 'a b  c'.split() }}{{ 'a,b'.split(',') }}{{ 'ab' | list }}", "['a', 'b', 'c']['a', 'b']['a', 'b']"),
        ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}", "123"),
        ("{% set a, b = 1, 2 %}{{ 'a b c' | wordwrap(1) | length }}{{ a in [1] }}{{ b is odd }}", "5TrueFalse"),
    ],
)
def test_what_bounds_leave_alone(source: str, expected: str) -> None:
    assert PromptTemplate(source).render({}) == expected
    assert ChatTemplate(source, None, None).render([]) == expected
