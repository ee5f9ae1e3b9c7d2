"""Advice on the order of a template's fields, on small tables."""

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen import advice
from batchgen.advice import Advice, advise
from batchgen.io.table import open_table
from batchgen.spec import InputSpec
from batchgen.text.prompt_template import Field, plain_fields

COMPUTED = 100_000
"""Prompt tokens that the job computes as it is."""


@pytest.fixture
def table(tmp_path: Path) -> str:
    """60 questions about 3 passages of a language each."""
    rows = range(60)
    frame = pl.DataFrame(
        {
            "question": [f"what is number {i}?" for i in rows],
            "passage": [f"{i % 3}" * 500 for i in rows],
            "lang": [f"language {i % 3 // 2}" for i in rows],
            "list": [[i] for i in rows],
            "nothing": [None if i % 2 else "x" * 200 for i in rows],
        }
    )
    frame.write_parquet(tmp_path / "rows.parquet")
    return str(tmp_path / "rows.parquet")


def advice_on(table: str, computed: int = COMPUTED, **given: Any) -> list[Advice]:
    spec = InputSpec.model_validate({"path": table, **given})
    return advise(spec, open_table(table, limit=spec.limit), computed)


def test_fields_of_few_values_first(table: str) -> None:
    (found,) = advice_on(table, prompt="Answer.\nQ: {{ question }}\nP: {{ passage }}\nA:")
    assert (found.order, found.values, found.before) == (("passage", "question"), (3, 60), ("question", "passage"))
    now = sum(len(f"what is number {i}?") + len("\nP: ") + 500 for i in range(60))
    then = 3 * (len("\nP: ") + 500) + sum(len(f"what is number {i}?") for i in range(60))
    assert found.saved_share == pytest.approx(1 - then / now)
    assert found.saved_tokens == round(found.saved_share * COMPUTED)
    assert found.text == (
        "in input.prompt, {{ passage }} (3 values) comes after {{ question }} (60 values); "
        "with passage first about 92% fewer prompt tokens would be computed"
    )


def test_three_fields(table: str) -> None:
    (found,) = advice_on(table, prompt="{{question}} {{passage}} {{lang}}")
    assert found.order == ("lang", "passage", "question")
    assert "in the order lang, passage, question" in found.text


def test_messages_are_looked_at_one_by_one(table: str) -> None:
    """What comes in an earlier message stays there: here it makes every row different already."""
    content = [{"role": "user", "content": "{{ lang }}"}, {"role": "user", "content": "{{ question }}{{ passage }}"}]
    (found,) = advice_on(table, messages=content)
    assert (found.key, found.order) == ("input.messages[1].content", ("passage", "question"))
    content[0]["content"] = "{{ question }}"
    content[1]["content"] = "{{ lang }}{{ passage }}"
    assert advice_on(table, messages=content) == []


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": "{{ passage }}{{ question }}"},  # as it should be
        {"prompt": "{{ lang }}{{ passage }}{{ question }}"},
        {"prompt": "{{ passage }}{{ lang }}{{ question }}"},  # the other order saves next to nothing
        {"prompt": "{{ question }}"},
        {"prompt": "no field"},
        {"prompt": "{{ question }}{{ passage | upper }}"},
        {"prompt": "{{ question }}{% if lang %}{{ passage }}{% endif %}"},
        {"prompt": "{{ question }}{{ passage }}{{ question }}"},
        {"prompt": "{{ question }}{{ list }}"},
        {"prompt": "{{ list }}{{ passage }}"},
        {"prompt": "{{ question }}{{ passage }}", "limit": 0},
        {"prompt": "{{ question }}{{ passage }}", "computed": 999},
        {"messages": "question"},
        {"token_ids": "list"},
        {"messages": [{"role": "{{ lang }}", "content": "{{ question }}{{ passage }}"}]},
        {
            "messages": [
                {"role": "system", "content": "{{ lang | upper }}"},
                {"role": "user", "content": "{{ question }}{{ passage }}"},
            ]
        },
    ],
)
def test_no_advice(table: str, given: dict[str, Any]) -> None:
    assert advice_on(table, **given) == []


def test_nulls_and_numbers_are_values_too(table: str) -> None:
    (found,) = advice_on(table, prompt="{{ question }}{{ nothing }}")
    assert (found.order, found.values) == (("nothing", "question"), (2, 60))


def test_values_of_dictionaries_and_of_many_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 10_000
    passages = pa.array([f"{i % 5}" * 300 for i in range(count)]).dictionary_encode()
    pq.write_table(pa.table({"n": list(range(count)), "p": passages}), tmp_path / "rows.parquet")
    (found,) = advice_on(str(tmp_path / "rows.parquet"), prompt="{{ n }}{{ p }}")
    assert (found.order, found.values) == (("p", "n"), (5, count))
    monkeypatch.setattr(advice, "SAMPLE_ROWS", 4000)
    (found,) = advice_on(str(tmp_path / "rows.parquet"), prompt="{{ n }}{{ p }}")
    assert found.values == (5, 4096)


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        ("a {{ b }} c {{ d }} e", [Field("b", ""), Field("d", " c ")]),
        ("{{ b }}{{ d }}", [Field("b", ""), Field("d", "")]),
        ("{# note #}{{ b }} c {% raw %}{{ x }}{% endraw %}{{ d }}", [Field("b", ""), Field("d", " c {{ x }}")]),
        ("text", []),
        ("{{ b.c }}", None),
        ("{{ 'text' }}", None),
        ("{% for x in b %}{{ x }}{% endfor %}", None),
        ("{% set x = 1 %}{{ b }}", None),
    ],
)
def test_plain_fields(source: str, fields: list[Field] | None) -> None:
    assert plain_fields(source) == fields
