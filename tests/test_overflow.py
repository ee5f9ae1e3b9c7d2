"""Prompts longer than the context are cut where the spec says; what fits is never touched."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.overflow import Overflow, truncate
from batchgen.prompt_sources import Encoded
from tests.conftest import DATA
from tests.test_job import results

ROW = st.tuples(st.integers(0, 40), st.integers(0, 30))
WAYS: list[Overflow] = ["truncate_left", "truncate_right", "truncate_middle"]


def cut(length: int, max_tokens: int, context: int, way: Overflow) -> list[int]:
    """The tokens that stay, by the definition."""
    if length <= context:
        return list(range(length))
    keep = min(context, max(context + 1 - max_tokens, context // 2 + 1))
    head = {"truncate_left": 0, "truncate_right": keep, "truncate_middle": -(-keep // 2)}[way]
    return [*range(head), *range(length - keep + head, length)]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), max_size=8), st.integers(1, 20), st.sampled_from(WAYS)
)
def test_truncate(rows: list[tuple[int, int]], context: int, way: Overflow) -> None:
    lengths = np.array([length for length, _ in rows], np.int32)
    tokens = np.concatenate([np.zeros(0, np.int32), *(np.arange(n, dtype=np.int32) for n in lengths)])
    most = np.array([max_tokens for _, max_tokens in rows], np.int64)
    found, lost = truncate(Encoded(tokens, lengths), most, context, way)
    wanted = [cut(length, max_tokens, context, way) for length, max_tokens in rows]
    assert found.lengths.tolist() == [len(row) for row in wanted] and (found.lengths <= context).all()
    assert found.tokens.tolist() == [token for row in wanted for token in row]
    assert (lost == lengths - found.lengths).all()


@pytest.mark.parametrize("way", WAYS)
def test_overlong_rows_are_answered(make_spec, run, tmp_path: Path, way: Overflow) -> None:
    """The model's context holds 8,192 tokens; the file's prompts have more, a short one is added."""
    frame = pl.read_parquet(DATA / "job" / "overlong.parquet").head(1).select("prompt")
    pl.concat([frame, pl.DataFrame({"prompt": ["Short."]})]).write_parquet(tmp_path / "rows.parquet")
    given = {"path": str(tmp_path / "rows.parquet"), "prompt": "{{ prompt }}", "chat": False, "overflow": way}
    spec = make_spec(input=given, sampling={"max_tokens": 3}, engine={"kernel": "auto"})
    assert run(spec).failed_rows == 0
    rows = results(spec).to_dicts()
    assert rows[0]["num_prompt_tokens"] == 8192 + 1 - 3
    assert rows[0]["truncated_tokens"] > 0 == rows[1]["truncated_tokens"]
    assert [row["num_generated_tokens"] for row in rows] == [3, 3]
