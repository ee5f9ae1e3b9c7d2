"""Two made jobs beside each other."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from batchgen import cli, compare
from batchgen.errors import OutputError
from tests.report.made_jobs import answer, failed, step, write_job

STEPS = [step(0, 0, 1, num_prefill_tokens=20), step(1, 1, 3)]


def two_jobs(folder: Path) -> tuple[Path, Path]:
    """Rows 0 to 3 and 1 to 4 (the last with two samples): of the three in both, 1 is equal, 2 and 3 differ."""
    a = [answer(0), answer(1), answer(2, text="the sun rose, and it was warm"), answer(3, finish_reason="length")]
    b = [answer(1), answer(2, text="the sun rose, and it rained"), failed(3, "prompt_missing", "x"), answer(4)]
    b.append(answer(4, sample_index=1))
    sampling = {"sampling": {"temperature": 0.5}}
    return write_job(folder / "a", a, STEPS), write_job(folder / "b", b, STEPS[:1], prefix="out_", **sampling)


def test_answers_are_matched_by_row_and_sample(tmp_path: Path):
    found = compare.compare_jobs(*two_jobs(tmp_path))
    assert (found.only_a, found.only_b, found.both) == (1, 2, 3)
    assert (found.equal_texts, found.different_texts, found.equal_finish_reasons) == (1, 2, 2)
    assert found.differences == [
        compare.TextDifference(2, 0, 21, "…he sun rose, and it was warm", "…he sun rose, and it rained"),
        compare.TextDifference(3, 0, 0, "yes", None),
    ]
    assert found.same_input
    assert found.settings == [("sampling.temperature", 0.0, 0.5), ("output.prefix", "", "out_")]


def test_figures_of_a_side(tmp_path: Path):
    found = compare.compare_jobs(*two_jobs(tmp_path))
    a, b = found.a.figures(), found.b.figures()
    assert (a["rows_per_s"], a["prompt_tokens_per_s"], a["generated_tokens_per_s"]) == (1.0, 10.0, 2.0)
    assert (a["ended_by_stop"], a["ended_by_length"], a["ended_by_error"]) == (3, 1, 0)
    assert (b["rows"], b["failed_rows"], b["answers"]) == (4, 1, 5)
    assert (b["generated_tokens_per_answer"], b["accuracy"], b["generating_seconds"]) == (2.0, None, 1.0)


@pytest.mark.parametrize("name", ["is_correct", "correct"])
def test_accuracy_is_the_mean_of_a_verdict(tmp_path: Path, name: str):
    right = pa.table({name: [True, False, None, True]})
    a = write_job(tmp_path / "a", [answer(i) for i in range(4)], inputs=right)
    b = write_job(tmp_path / "b", [answer(0)], inputs=pa.table({name: ["yes"]}))  # no verdict: text
    found = compare.compare_jobs(a, b)
    assert (found.a.accuracy, found.b.accuracy) == (pytest.approx(2 / 3), None)


@pytest.mark.parametrize(
    ("a", "b", "same", "shown"),
    [
        ("ab1" + "x" * 99, "ab2", 2, ("ab1" + "x" * 59 + "…", "ab2")),
        ("abc", "abcd", 3, ("abc", "abcd")),
        ("", None, 0, ("", None)),
        ("é" * 50 + "1", "é" * 50 + "2", 50, ("…" + "é" * 20 + "1", "…" + "é" * 20 + "2")),
    ],
)
def test_where_texts_part(a, b, same, shown):
    found = compare.text_difference(1, 0, a, b)
    assert (found.same, (found.a, found.b)) == (same, shown)


def test_few_differences_are_shown_of_many(tmp_path: Path):
    paths = [write_job(tmp_path / name, [answer(i, text=name) for i in range(30)], STEPS) for name in ("a", "b")]
    found = compare.compare_jobs(*paths)
    assert [d.row_index for d in found.differences] == list(range(compare.SHOWN_ROWS))
    assert found.different_texts == 30


def test_compare_prints_both(tmp_path: Path, capsys):
    a, b = map(str, two_jobs(tmp_path))
    assert cli.main(["compare", a, b]) == 0
    out, error = capsys.readouterr()
    lines = out.splitlines()
    assert lines[:3] == [f"{a} | {b} | B / A", "sampling.temperature | 0.0 | 0.5", 'output.prefix | "" | "out_"']
    assert "rows per s | 1.00 | 3.00 | 3.00" in lines
    assert "texts that differ: 2 (66.7%)" in lines
    assert lines[-6:] == [
        "row 2: the same for 21 characters, then",
        '  A: "…he sun rose, and it was warm"',
        '  B: "…he sun rose, and it rained"',
        "row 3: the same for 0 characters, then",
        '  A: "yes"',
        "  B: no text",
    ]
    assert error == ""


def test_settings_that_differ_far_in_are_shown_from_there(tmp_path: Path, capsys):
    """Each setting has a line, those of engine.cache too."""
    long = "Answer the question. " * 20
    jobs = [
        write_job(
            tmp_path / name,
            [answer(0)],
            STEPS,
            input={"path": "x", "prompt": long + name},
            engine={"cache": {"disk_path": f"/a/{name}", "disk_bytes": size}},
        )
        for name, size in (("a", 10), ("b", 20))
    ]
    assert cli.main(["compare", *map(str, jobs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == [
        'input.prompt | …nswer the question. a" | …nswer the question. b"',
        'engine.cache.disk_path | "/a/a" | "/a/b"',
        "engine.cache.disk_bytes | 10 | 20",
    ]


def test_compare_as_json(tmp_path: Path, capsys):
    a, b = two_jobs(tmp_path)
    assert cli.main(["compare", str(a), str(b), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["a"]["directory"] == str(a) and values["b"]["rows"] == 4
    assert values["answers"]["different_texts"] == 2
    assert values["settings"][0] == {"name": "sampling.temperature", "a": 0.0, "b": 0.5}
    assert values["differences"][1]["b"] is None


def test_other_inputs_are_told(tmp_path: Path, capsys):
    a = write_job(tmp_path / "a", [answer(0)], STEPS)
    b = write_job(tmp_path / "b", [answer(0)], STEPS, record={"identity": {"input": "other", "model": "m"}})
    assert cli.main(["compare", str(a), str(b)]) == 0
    assert "warning: the two jobs read different inputs" in capsys.readouterr().err


def test_empty_jobs_compare(tmp_path: Path, capsys):
    paths = [str(write_job(tmp_path / name, [])) for name in ("a", "b")]
    assert cli.main(["compare", *paths]) == 0
    assert "texts that differ: 0" in capsys.readouterr().out.splitlines()


def test_what_cannot_be_compared_is_one_line(tmp_path: Path, capsys):
    a = write_job(tmp_path / "a", [answer(0)], STEPS)
    b = write_job(tmp_path / "b", [], state="running")
    assert cli.main(["compare", str(a), str(b)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {b}: the job is not finished; ")
    (a / "results" / "part-00000.parquet").write_bytes(b"")
    with pytest.raises(OutputError, match="its tables cannot be read"):
        compare.compare_jobs(a, a)
