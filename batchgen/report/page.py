"""One HTML file about a finished job, which loads nothing: the charts' library is in it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NamedTuple

import jinja2
import polars as pl
import vl_convert
from markupsafe import Markup

from batchgen.io.delivered import DeliveredJob, reading
from batchgen.io.files import cache_root, output_errors, write_atomically, write_to
from batchgen.report.charts import all_charts
from batchgen.report.figures import SHOWN, Figures, Totals, job_figures
from batchgen.text.prompt_template import PromptTemplate
from batchgen.yaml_text import write_yaml

LATENCY_NAMES = {
    "queued": "waiting in the queue",
    "prefill": "computing the prompt",
    "first token": "time to first token",
    "per token": "time per token",
    "answer": "the whole answer",
}
FEATURES = ("amx-bf16", "amx-int8", "avx512f", "avx512bf16", "avx512vnni", "avx2", "fma", "neon", "sve")
"""Those of a processor's many that decide about speed."""
_UNSEEN = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"},
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), 0xFFFE, 0xFFFF], 0xFFFD),
}
"""Characters that HTML cannot hold, and signs for them."""


class Headline(NamedTuple):
    """A figure that says how the job went."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Written:
    """Where a report is, and its main figures."""

    path: Path
    headline: list[Headline]


@dataclass(frozen=True, slots=True)
class Cut:
    """A text, or its beginning; `left` characters are not shown."""

    text: str
    left: int


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """An answer beside the columns that its prompt was made of."""

    row: int
    sample: int
    id: str | None
    facts: list[str]
    prompt: list[tuple[str, Cut]]
    answer: Cut
    error: str | None


def write_report(directory: Path, output: Path | None = None) -> Written:
    """Writes the report of a finished job, to DIRECTORY/report.html unless told otherwise.

    Raises OutputError when there is no such job, when its tables are damaged, or when the page cannot be written.
    """
    job, path = DeliveredJob.open(directory), output or directory / "report.html"
    with reading(directory):
        figures = job_figures(job)
        page = render_page(job, figures)
    with output_errors(path):
        write_to(path, partial(_fill, page))
    return Written(path, headline(figures))


def render_page(job: DeliveredJob, figures: Figures) -> str:
    """The page's HTML; every text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=visible,
    )
    charts = all_charts(figures, job.record["plan"]["kv_pages"])
    shown = shown_answers(job, pl.concat([figures.samples, figures.longest]))
    return environment.get_template("page.html.j2").render(
        job=job,
        totals=figures.totals,
        headline=headline(figures),
        facts=facts(job),
        charts=charts,
        specs={chart.id: {**chart.spec, "description": chart.title} for chart in charts.values()},
        script=Markup(vega_script()),
        latencies=[(LATENCY_NAMES[row["name"]], row) for row in figures.latencies.iter_rows(named=True)],
        parts=figures.time_parts.rows(named=True),
        failures=shown_failures(job, figures.failures),
        samples=shown[: figures.samples.height],
        longest=shown[figures.samples.height :],
        spec=write_yaml(job.record["spec"]),
        number=number,
        duration=duration,
        percent=percent,
    )


# --- texts -------------------------------------------------------------------------------------------------------


def visible(value: Any) -> Any:
    """What a template writes, with signs for control characters."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return value.replace("\r\n", "\n").translate(_UNSEEN)


def number(value: float | None) -> str:
    """A count, or a rate to three digits."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else _digits(value)


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def percent(share: float) -> str:
    return f"{share:.1%}"


def duration(seconds: float | None) -> str:
    """Seconds in the unit that fits: `12.3 ms`, `4.56 s`, `1 h 02 min`."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{_digits(seconds * 1e3)} ms"
    if seconds < 100:
        return f"{_digits(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def headline(figures: Figures) -> list[Headline]:
    """The figures that say how the job went; rates are over the time from the first step to the last."""
    totals = figures.totals
    spread = {row["name"]: row for row in figures.latencies.iter_rows(named=True)}
    return [
        Headline("rows/s", number(totals.rate(totals.rows - totals.failed_rows))),
        Headline("generated tokens/s", number(totals.rate(totals.generated_tokens))),
        Headline("prompt tokens/s", number(totals.rate(totals.prompt_tokens)), _found(totals)),
        *(_latency(name, spread[name]) for name in ("first token", "per token")),
    ]


def _found(totals: Totals) -> str:
    """How many of the prompt tokens did not have to be computed, and why; nothing where none was computed at all."""
    if not totals.computed_prompt_tokens:
        return ""
    shared = f"{percent(totals.shared_prompt_tokens / totals.prompt_tokens)} shared"
    restored = f"{percent(totals.restored_prompt_tokens / totals.prompt_tokens)} restored"
    return f"{shared}, {restored}" if totals.restored_prompt_tokens else shared


def _latency(name: str, row: Mapping[str, Any]) -> Headline:
    return Headline(LATENCY_NAMES[name], duration(row["p50"]), f"p99 {duration(row['p99'])}")


def facts(job: DeliveredJob) -> list[tuple[str, str]]:
    """Where the figures come from: the model, the machine, the versions, the times around generating."""
    record = job.record
    numerics, cpu, totals = record["numerics"], record["cpu"], record["totals"]
    features = [name for name in cpu["features"] if name in FEATURES]
    times = [f"{name} {duration(totals[f'{name}_seconds'])}" for name in ("plan", "load", "compile", "generate")]
    return [
        ("model", f"{record['model']['name']}, {record['spec']['model']['source']}"),
        ("kernel", f"{numerics['kernel']}, weights {numerics['weights']}, KV cache {numerics['kv_dtype']}"),
        ("machine", f"{cpu['machine']}, {record['threads']} threads of {cpu['count']} cores; {' '.join(features)}"),
        ("started", f"{datetime.fromisoformat(record['started']):%Y-%m-%d %H:%M:%S %Z}"),
        ("expected", expected(record["plan"]["generate_seconds"])),
        ("last run", f"{duration(totals['wall_seconds'])}: {', '.join(times)}"),
        ("set back for memory", f"{number(record['preemptions'])} sequences"),
        ("versions", ", ".join(f"{name} {version}" for name, version in record["versions"].items())),
        ("input", record["spec"]["input"]["path"]),
    ]


def expected(seconds: Sequence[float] | None) -> str:
    """What the plan said of generating."""
    if seconds is None:
        return "not known on this machine beforehand"
    low, high = map(duration, seconds)
    return f"{low} to {high} of generating"


# --- rows --------------------------------------------------------------------------------------------------------


def prompt_columns(job: DeliveredJob) -> list[str]:
    """The input's columns that prompts were made of, as far as they were passed through."""
    given = job.record["spec"]["input"]
    templates = [given["prompt"]] if given["prompt"] else []
    names = [given["token_ids"]] if given["token_ids"] else []
    if isinstance(given["messages"], str):
        names = [given["messages"]]
    elif given["messages"]:
        templates = [text for message in given["messages"] for text in message.values()]
    names += sorted({name for text in templates for name in PromptTemplate(text).columns})
    return [name for name in names if name in job.input_schema()]


def shown_answers(job: DeliveredJob, answers: pl.DataFrame) -> list[ShownAnswer]:
    columns, name = prompt_columns(job), job.record["spec"]["input"]["id"]
    wanted = dict.fromkeys([*columns, *([name] if name in job.input_schema() else [])])
    rows = job.input_rows(answers["row_index"].to_list(), list(wanted)) if answers.height else {}
    return [_shown(answer, rows[answer["row_index"]], columns, name) for answer in answers.iter_rows(named=True)]


def _shown(answer: Mapping[str, Any], row: Mapping[str, Any], columns: Sequence[str], name: str | None) -> ShownAnswer:
    text = answer["text"] or ""
    counts = f"{answer['num_prompt_tokens']:,} prompt tokens, {answer['num_generated_tokens']:,} generated"
    times = [] if answer["seconds"] is None else [duration(answer["seconds"])]
    return ShownAnswer(
        row=answer["row_index"],
        sample=answer["sample_index"],
        id=shown_id(row.get(name)) if name else None,
        facts=[counts, answer["finish_reason"], *times],
        prompt=[(column, cut(as_text(row[column]))) for column in columns],
        answer=Cut(text, (answer["characters"] or 0) - len(text)),
        error=answer["error"],
    )


def shown_failures(job: DeliveredJob, failures: pl.DataFrame) -> list[dict[str, Any]]:
    """Codes with their `rows` and `examples` of (row, id, message)."""
    name = job.record["spec"]["input"]["id"]
    columns = [name] if name in job.input_schema() else []
    indices: Iterable[int] = failures["row_index"].explode().drop_nulls().to_list()
    rows = job.input_rows(list(indices), columns) if columns and indices else {}

    def example(row: int, message: str, characters: int) -> tuple[int, str | None, Cut]:
        return row, shown_id(rows.get(row, {}).get(name)), Cut(message, characters - len(message))

    return [
        {"code": code, "rows": count, "examples": list(map(example, *lists))}
        for code, count, *lists in failures.iter_rows()
    ]


def shown_id(value: Any) -> str | None:
    if value is None:
        return None
    short = cut(as_text(value), 80)
    return short.text + ("…" if short.left else "")


def cut(text: str, most: int = SHOWN) -> Cut:
    return Cut(text[:most], max(0, len(text) - most))


def as_text(value: Any) -> str:
    """A value of the input: text as it is, chat messages a paragraph each, all else as JSON."""
    if isinstance(value, str):
        return value
    if (
        isinstance(value, list)
        and value
        and all(isinstance(v, dict) and {"role", "content"} <= v.keys() for v in value)
    ):
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in value)
    return json.dumps(value, ensure_ascii=False, default=str)


# --- the charts' library -----------------------------------------------------------------------------------------


def vega_script() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script (900 kB). Bundling takes a second, so it is kept in the cache."""
    path = vega_cache()
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8")
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    with suppress(OSError):  # then it is bundled again the next time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, partial(_fill, script))
    return script


def vega_cache() -> Path:
    return cache_root() / "report" / f"vega-{version('vl-convert-python')}.js"


def _fill(text: str, file: IO[bytes]) -> None:
    file.write(text.encode())
