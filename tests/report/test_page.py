"""The page as text: what is in it, and that it loads nothing, holds nothing hostile and stays small."""

import datetime
import decimal
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import altair as alt
import pyarrow as pa
import pytest

from batchgen.errors import OutputError
from batchgen.io.delivered import DeliveredJob
from batchgen.report import page
from batchgen.report.charts import all_charts
from batchgen.report.figures import job_figures
from tests.report.made_jobs import answer, failed, step, token, write_job

HOSTILE = [
    "</script><script>window.broken = 1</script>",
    '<img src=x onerror="window.broken=1"> & \' " &amp; <!-- ]]>',
    "a\x00b\x1b[31mc\x7f\x85\r\nd\ufffe",
    "\u202eright to left\u202c שלום مرحبا",
    "👩‍👩‍👧 \U0001f9ff e\u0301 {{ 7 * 7 }} {% raw %} ${x} `",
    "",
    "x" * 100_000,
    "wide " * 30_000,
]
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Fails where tags do not close in order; collects text by tag, and attributes."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all_of(self, tag: str) -> list[str]:
        return [text for where, text in self.texts if where == tag]


def hostile_job(directory: Path, name: str = "made") -> Path:
    """Bad texts as prompts, answers, ids, error messages and column names."""
    count = len(HOSTILE)
    answers = [answer(i, text=text) for i, text in enumerate(HOSTILE)]
    answers += [failed(count + i, f"code_{i}", text) for i, text in enumerate(HOSTILE)]
    message = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    talks = [[{"role": "<b>user", "content": text}] for text in HOSTILE * 2]
    inputs = pa.table({"</td><b>&": pa.array(talks, message), "id": pa.array(HOSTILE * 2)})
    steps = [step(n, n, 1, num_prefill_tokens=10, num_seqs=3, pages_used=n % 8) for n in range(12)]
    tokens = [token(i, k, k) for i in range(count) for k in range(2)]
    given = {"path": HOSTILE[0], "messages": "</td><b>&", "id": "id"}
    return write_job(directory, answers, steps, tokens, inputs=inputs, input=given, name=name)


@pytest.fixture
def html(tmp_path: Path) -> str:
    return page.write_report(hostile_job(tmp_path / "job")).path.read_text("utf-8")


def test_the_page_is_well_formed_and_loads_nothing(html: str):
    found = Page(html)
    loads = [a for a in found.attributes if a[1] in ("src", "href", "srcset", "action", "data", "poster")]
    assert loads == []
    assert "@import" not in html and not re.search(r"url\((?!#)", "".join(found.all_of("style")))
    assert [value for tag, name, value in found.attributes if tag == "script"] == []
    assert not [name for _, name, _ in found.attributes if name.startswith("on")]


def test_hostile_texts_are_texts(html: str):
    found = Page(html)
    scripts = found.all_of("script")
    assert len([text for text in scripts if text.strip()]) == 3  # the collector of errors, Vega, the charts
    assert not any("window.broken" in text for text in scripts)
    shown = "\n".join(text for tag, text in found.texts if tag != "script")
    assert shown.count(HOSTILE[0]) >= 3
    assert "a␀b␛[31mc␡\ufffd\nd\ufffd" in shown
    assert HOSTILE[4] in shown
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]", html)
    assert "… 98,000 more characters" in shown
    assert len(html.encode()) < 1_200_000


def test_a_right_to_left_text_stays_in_its_box(html: str):
    pres = [(name, value) for tag, name, value in Page(html).attributes if tag == "pre"]
    assert pres.count(("dir", "auto")) >= len(HOSTILE)


def test_failures_name_row_and_reason(html: str):
    cells = Page(html)
    assert {f"code_{i}" for i in range(len(HOSTILE))} <= set(cells.all_of("td"))
    assert "… 99,700 more characters" in cells.all_of("span")
    assert any(text.startswith(f"row {len(HOSTILE)} ") for text in cells.all_of("span"))


def test_every_chart_is_valid_vega_lite(tmp_path: Path):
    figures = job_figures(DeliveredJob.open(hostile_job(tmp_path / "job")))
    charts = all_charts(figures, 8)
    assert list(charts) == [
        *("answers", "generated", "prompt", "seqs", "kv", "parts", "first_token", "per_token", "lengths", "sharing")
    ]
    for chart in charts.values():
        kind: Any = alt.LayerChart if "layer" in chart.spec else alt.Chart
        kind.from_dict(chart.spec, validate=True)


@pytest.mark.parametrize(
    ("answers", "tokens", "left_out"),
    [
        ([answer(0)], None, {"answers"}),
        ([failed(0, "prompt_missing", "null")], [], {"first_token", "per_token", "lengths", "sharing"}),
        ([answer(0, num_generated_tokens=1)], [token(0, 0, 0)], {"per_token"}),
    ],
)
def test_charts_without_data_are_left_out(tmp_path: Path, answers, tokens, left_out):
    rows = [step(n, n, 1, num_decode_tokens=1, num_seqs=1) for n in range(3)]
    path = write_job(tmp_path / "job", answers, rows, tokens)
    charts = all_charts(job_figures(DeliveredJob.open(path)), 8)
    every = {"answers", "prompt", "generated", "seqs", "kv", "parts", "first_token", "per_token", "lengths", "sharing"}
    assert charts.keys() == every - left_out
    if tokens is None:
        assert "without the first token of each" in charts["generated"].text
    Page(page.write_report(path).path.read_text("utf-8"))


def test_an_empty_job_has_a_page(tmp_path: Path):
    written = page.write_report(write_job(tmp_path / "job", []))
    text = written.path.read_text("utf-8")
    assert "Nothing was computed" in text and "No row failed" in text
    speeds = ("rows/s", "generated tokens/s", "prompt tokens/s")
    assert [tuple(figure) for figure in written.headline[:3]] == [(name, "0.00", "") for name in speeds]


def test_tokens_that_were_not_computed_are_named_by_where_they_were_found(tmp_path: Path):
    """A row that asks for no tokens has no prompt computed, and nothing shared."""
    totals = {"computed_prompt_tokens": 10, "restored_prompt_tokens": 4, "prompt_tokens": 40}
    answers = [answer(0, num_cached_tokens=7), answer(0, num_cached_tokens=7, sample_index=1)]
    answers += [answer(row, num_generated_tokens=0) for row in (1, 2, 3)]
    path = write_job(tmp_path / "job", answers, [step(0, 0, 1)])
    record = json.loads((path / "job.json").read_text())
    (path / "job.json").write_text(json.dumps({**record, "totals": {**record["totals"], **totals}}))
    assert page.write_report(path).headline[2].note == "7.5% shared, 10.0% restored"


def test_the_headline(tmp_path: Path):
    rows = [step(0, 0, 1, num_prefill_tokens=15), step(1, 1, 3)]
    path = write_job(tmp_path / "job", [answer(0, num_cached_tokens=5), answer(1)], rows)
    written = page.write_report(path, tmp_path / "x.html")
    assert written.path == tmp_path / "x.html"
    assert [tuple(figure) for figure in written.headline] == [
        ("rows/s", "0.50", ""),
        ("generated tokens/s", "1.00", ""),
        ("prompt tokens/s", "5.00", "25.0% shared"),
        ("time to first token", "750 ms", "p99 750 ms"),
        ("time per token", "100 ms", "p99 100 ms"),
    ]
    assert not (tmp_path / "job" / "report.html").exists()


def test_inputs_of_every_type_are_shown(tmp_path: Path):
    inputs = pa.table(
        {
            "wide": pa.array([decimal.Decimal("1.50"), None], pa.decimal256(50, 2)),
            "far": pa.array([400_000_000_000_000, 0], pa.timestamp("s")),  # a year that Python does not know
            "raw": pa.array([b"\xff\x00", b""]),
            "day": pa.array([datetime.date(2026, 1, 2), None]),
            "tags": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
        }
    )
    prompt = "{{ wide }} {{ far }} {{ raw }} {{ day }} {{ tags }}"
    path = write_job(tmp_path / "job", [answer(0), answer(1)], inputs=inputs, input={"path": "x", "prompt": prompt})
    text = "\n".join(Page(page.write_report(path).path.read_text("utf-8")).all_of("pre"))
    for value in ('"1.50"', "(a timestamp[ms] that Python cannot hold)", '"2026-01-02"', '[["k", 1]]', "null", "\\xff"):
        assert value in text


def test_chat_messages_are_shown_by_role(tmp_path: Path):
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    inputs = pa.table({"chat": [talk]})
    path = write_job(tmp_path / "job", [answer(0)], inputs=inputs, input={"path": "x", "messages": "chat"})
    assert "system: Be brief.\n\nuser: Hi" in page.write_report(path).path.read_text("utf-8")


def test_columns_that_were_not_passed_through_are_not_looked_for(tmp_path: Path):
    given = {"path": "x", "prompt": "{{ a }} {{ b }}", "id": "c"}
    path = write_job(tmp_path / "job", [answer(0)], inputs=pa.table({"b": ["here"]}), input=given)
    assert page.prompt_columns(DeliveredJob.open(path)) == ["b"]
    assert "here" in page.write_report(path).path.read_text("utf-8")


def test_a_large_job_has_a_small_page(tmp_path: Path):
    answers = [answer(i, text=str(i) * 20_000, num_generated_tokens=i % 500) for i in range(200)]
    answers += [failed(200 + i, f"code_{i % 7}", "m" * 50_000) for i in range(50)]
    rows = [step(n, n / 10, 0.1, num_prefill_tokens=n % 77, num_seqs=n % 9, pages_used=n % 8) for n in range(5000)]
    path = write_job(tmp_path / "job", answers, rows, [token(0, 0, n) for n in range(5000)])
    assert page.write_report(path).path.stat().st_size < 1_300_000


def without(*keys: str):
    """Spoils a job by taking a value out of its job.json."""

    def spoil(job: Path) -> None:
        record = json.loads((job / "job.json").read_text())
        place = record
        for key in keys[:-1]:
            place = place[key]
        del place[keys[-1]]
        (job / "job.json").write_text(json.dumps(record))

    return spoil


def is_folder(name: str):
    """Spoils a job by a folder, which cannot be read, in a file's place."""

    def spoil(job: Path) -> None:
        (job / name).unlink(missing_ok=True)
        (job / name).mkdir()

    return spoil


def is_file(name: str):
    def spoil(job: Path) -> None:
        shutil.rmtree(job / name)
        (job / name).write_bytes(b"")

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda job: (job / "job.json").unlink(), ": holds no batchgen job; name the output folder of a job"),
        (lambda job: (job / "job.json").write_text("{"), "/job.json is no JSON: nothing tells which job this is; "),
        (lambda job: (job / "job.json").write_bytes(b"\xff"), "/job.json is no JSON: "),
        (is_folder("job.json"), "/job.json cannot be read: Is a directory"),
        (without("totals"), "/job.json lacks totals; --fresh runs the job again"),
        (without("plan"), "/job.json lacks plan; --fresh runs the job again"),
        (without("totals", "wall_seconds"), "/job.json lacks totals.wall_seconds; --fresh runs the job again"),
        (lambda job: (job / "steps" / "part-00000.parquet").unlink(), "steps/ is missing; --fresh runs the job again"),
        (is_file("results"), "/results cannot be read: Not a directory"),
        (lambda job: (job / "results" / "part-00000.parquet").write_bytes(b"PAR1"), "its tables cannot be read"),
        (lambda job: (job / "report.html").mkdir(), "cannot write"),
    ],
)
def test_what_cannot_be_reported_is_one_line(tmp_path: Path, spoil, message):
    path = write_job(tmp_path / "job", [answer(0)], [step(0, 0, 1)])
    spoil(path)
    with pytest.raises(OutputError, match=re.escape(message)) as caught:
        page.write_report(path)
    assert "\n" not in str(caught.value)


def test_a_report_goes_where_it_is_told_to(tmp_path: Path):
    """Into a pipe as into a file; a link is followed, and a folder that is missing is named."""
    path, pipe, link = write_job(tmp_path / "job", [answer(0)], [step(0, 0, 1)]), tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "target")
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(pipe.read_text, "utf-8")
        page.write_report(path, pipe)
        assert text.result(20).startswith("<!DOCTYPE html>")
    assert pipe.is_fifo()
    for _ in range(2):
        page.write_report(path, link)
    assert link.is_symlink() and (tmp_path / "target").read_text("utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(OutputError, match=re.escape(f"there is no folder {tmp_path}/none; make it and run")):
        page.write_report(path, tmp_path / "none" / "x.html")


def test_a_job_that_is_not_finished_has_no_report(tmp_path: Path):
    path = write_job(tmp_path / "job", [], state="running")
    with pytest.raises(OutputError, match=r"job: the job is not finished; run the command that started it again"):
        page.write_report(path)
    for name, what in (("none", "no such directory"), ("job/job.json", "is a file")):
        with pytest.raises(OutputError, match=f"{name}: {what}; name the output folder of a job"):
            page.write_report(tmp_path / name)


def test_the_script_is_kept_in_the_cache(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("BATCHGEN_CACHE_DIR", str(tmp_path))
    script = page.vega_script()
    assert "vegaEmbed" in script and "</script" not in script
    assert page.vega_cache().read_text("utf-8") == script
    page.vega_cache().write_text("kept")
    assert page.vega_script() == "kept"
    monkeypatch.setenv("BATCHGEN_CACHE_DIR", str(page.vega_cache()))  # a file: no folder can be made there
    assert page.vega_script() == script


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.0, "0.00 ms"), (0.0123, "12.3 ms"), (0.9, "900 ms"), (1.0, "1.00 s"), (59.94, "59.9 s"),
     (100.0, "1 min 40 s"), (3599.6, "1 h 00 min"), (7322, "2 h 02 min")],
)  # fmt: skip
def test_durations(seconds, text):
    assert page.duration(seconds) == text


def test_texts_of_values():
    assert page.as_text([]) == "[]"
    assert page.as_text([{"role": "user"}]) == '[{"role": "user"}]'
    assert json.loads(page.as_text({"a": 1})) == {"a": 1}
    assert page.shown_id(None) is None
    assert page.shown_id("x" * 100) == "x" * 80 + "…"
    assert page.shown_id(7) == "7"
