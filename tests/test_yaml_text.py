"""YAML as the 1.2 core schema has it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.errors import SpecError
from batchgen.yaml_text import read_yaml, write_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E+5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("0x10", 16),
        ("0o17", 15),
        ("017", 17),
        ("-3", -3),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("-.inf", -math.inf),
    ],
)
def test_what_is_not_text(text, value):
    read = read_yaml(f"a: {text}", "f")["a"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "text", ["no", "off", "yes", "On", "y", "1_000", "0b11", "2024-01-01", "12:30", "=", "<<", "tRue", "0x", "1e", "."]
)
def test_what_stays_text(text):
    assert read_yaml(f"a: {text}", "f") == {"a": text}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", 'f:2:1: not valid YAML: while constructing a mapping: found duplicate key "a"'),
        ("a: [1,\n 'x", "f:2:4: not valid YAML: while scanning a quoted scalar"),
        ("a: *b", "f:1:4: not valid YAML: found undefined alias"),
        ("a: &a [*a]", "f:1:4: a value contains itself through an alias"),
        ("a\n---\nb", "f:2:1: not valid YAML: expected a single document"),
        ("1: 2", "f:1:1: a key must be text, but 1 is not; put it in quotes"),
        ("a: !!binary aGk=", "f:1:4: the tag !!binary is not supported"),
        ("a: !!python/object:os.system x", "f:1:4: the tag !!python/object:os.system is not supported"),
        ("a: !!int x", "f: not valid YAML: invalid literal"),
        ("a: " + "9" * 5000, "f: not valid YAML: Exceeds the limit"),
        ("a: \x01", "f: not valid YAML: unacceptable character"),
        ("a: " + "[" * 60 + "]" * 60, "f:1:54: nested deeper than 50 levels"),
        ("a: " + "[" * 5000, "f:1:54: nested deeper than 50 levels"),
        ("a: [" + "1," * 500_000 + "]", "more than 10000 values; this is not a job spec"),
        ("a: {{ x }}", 'f:1:5: a key must be text; a value that starts with "{{" must be quoted'),
        ("a: {{ x }}, b", 'a value that starts with "{{" must be quoted'),
        ("#" * (2 << 20), "f: longer than 1 MiB"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(SpecError) as error:
        read_yaml(text, "f")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_aliases_are_read_and_bombs_refused_at_once():
    assert read_yaml("a: &x [1]\nb: *x", "f") == {"a": [1], "b": [1]}
    levels = [f"l{i}: &l{i} [{','.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 20)]
    with pytest.raises(SpecError, match="more than 10000 values once its aliases are expanded"):
        read_yaml("\n".join(["l0: &l0 [x]", *levels]), "f")


@pytest.mark.filterwarnings("error")
def test_an_anchor_may_be_used_again():
    assert read_yaml("a: &x 1\nb: &x 2\nc: *x", "f") == {"a": 1, "b": 2, "c": 2}


def test_positions_can_be_left_out():
    with pytest.raises(SpecError, match=r"^f: not valid YAML: "):
        read_yaml("[", "f", positions=False)


texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["no", "1e-5", "1_000", "~", "=", "{{ x }}", "0o7"]
)
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(texts, st.recursive(values, lambda inner: st.lists(inner, max_size=4), max_leaves=8), max_size=4)
)
def test_written_yaml_reads_back_equal(value):
    back = read_yaml(write_yaml(value), "f")
    assert back == value
    assert repr(back) == repr(value)
