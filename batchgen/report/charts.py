"""The charts of a report as Vega-Lite specs. Colours are CSS variables of the page, which knows light and dark."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import altair as alt
import polars as pl

from batchgen.report.figures import PARTS, Figures, Totals

HEIGHT = 190
SERIES = [f"var(--series-{number})" for number in range(1, 5)]
CONFIG: Mapping[str, Any] = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "gridColor": "var(--line)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titlePadding": 8,
    },
    "axisX": {"grid": False, "tickCount": 8, "labelOverlap": True},
    "axisY": {"domain": False, "ticks": False, "tickCount": 4},
    "legend": {"labelColor": "var(--text)", "title": None, "orient": "top", "offset": 4, "symbolType": "square"},
}


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture with its title and a sentence that says what is seen; `spec` is Vega-Lite."""

    id: str
    title: str
    text: str
    spec: dict[str, Any]


def all_charts(figures: Figures, kv_pages: int) -> dict[str, Chart]:
    """The charts that the job has data for, by their ids. `kv_pages`: the size of the KV cache."""
    charts: list[Chart] = []
    if figures.timeline.height:
        charts += _over_time(figures, kv_pages)
    if figures.first_token.height:
        charts.append(_first_token(figures.first_token))
    if figures.per_token.height:
        charts.append(_per_token(figures.per_token))
    if figures.lengths.height:
        charts.append(_lengths(figures.lengths))
    if figures.totals.prompt_tokens:
        charts.append(_sharing(figures.totals))
    return {chart.id: chart for chart in charts}


# --- over time ---------------------------------------------------------------------------------------------------


OVER_TIME: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (
        "generated",
        "Generated tokens per second",
        "Tokens of the answers{without}.",
        {"title": "tokens/s", "series": 1},
    ),
    (
        "prompt",
        "Prompt tokens per second",
        "Prompt tokens that were computed; what was shared with another row costs nothing and is not counted.",
        {"title": "tokens/s", "series": 0},
    ),
    (
        "seqs",
        "Batch size",
        "Sequences in a step, on average: the more there are, the better a step uses the machine.",
        {"title": "sequences", "series": 2},
    ),
    (
        "kv",
        "KV cache in use",
        "Share of the {kv_pages:,} pages that hold keys and values, on average.",
        {"title": "of all pages", "series": 3, "form": ".0%"},
    ),
)
"""Column of the timeline, title, text and options of `_spans`."""


def _over_time(figures: Figures, kv_pages: int) -> list[Chart]:
    scale, unit = time_unit(figures.totals.seconds)
    frame = figures.timeline.with_columns(pl.col("start_s", "end_s") / scale, kv=pl.col("pages") / max(1, kv_pages))
    frame = _rounded(frame.rename({"start_s": "start", "end_s": "end"}))
    recorded = frame["finished"].null_count() == 0
    without = "" if recorded else " without the first token of each, since the job kept no timings"
    charts = [
        Chart(name, title, text.format(kv_pages=kv_pages, without=without), _spans(frame, name, unit, **options))
        for name, title, text, options in OVER_TIME
    ]
    parts = Chart("parts", "Over time", "What the steps of each span spent their time on.", _time_parts(frame, unit))
    return [*([_answers(frame, unit)] if recorded else []), *charts, parts]


def time_unit(seconds: float) -> tuple[float, str]:
    """Seconds per unit, and the unit, that a job of this length is shown in."""
    return (1.0, "s") if seconds < 300 else (60.0, "min") if seconds < 3 * 3600 else (3600.0, "h")


def _answers(frame: pl.DataFrame, unit: str) -> Chart:
    return Chart(
        "answers",
        "Answers over time",
        "Answers finished so far. Rows that failed before they were computed are not among them.",
        _spans(frame, "finished", unit, title="answers", series=0, form=",.0f", smooth=True),
    )


def _spans(
    frame: pl.DataFrame, column: str, unit: str, *, title: str, series: int, form: str = ",.3~s", smooth: bool = False
) -> dict[str, Any]:
    """An area over the spans of the timeline; `smooth` joins the values that hold at the ends of spans."""
    at = "end" if smooth else "start"
    edge = {"start": frame["start"][-1:], "end": frame["end"][-1:]}
    extra = pl.DataFrame({at: [0.0], column: [0.0]} if smooth else {at: edge["end"], column: frame[column][-1:]})
    points = pl.concat([frame.select(at, pl.col(column).cast(pl.Float64)), extra.cast(pl.Float64)]).sort(at)
    area = (
        alt.Chart(points)
        .mark_area(
            interpolate="linear" if smooth else "step-after",
            color=SERIES[series],
            fillOpacity=0.18,
            line={"color": SERIES[series], "strokeWidth": 1.6},
        )
        .encode(x=_time(at, unit), y=alt.Y(f"{column}:Q", title=title, axis=_axis(form.replace(".0f", "~s"))))
    )
    tips = [alt.Tooltip(f"{column}:Q", title=title, format=form)]
    return _finished(alt.layer(area, _hover(frame.select("start", "end", column), unit, tips)))


def _time_parts(frame: pl.DataFrame, unit: str) -> dict[str, Any]:
    whole = pl.sum_horizontal(PARTS)
    shares = _rounded(frame.select("start", "end", *(pl.col(part) / whole.clip(1e-12) for part in PARTS)))
    last = shares[-1:].with_columns(start="end")
    long = pl.concat([shares, last]).unpivot(PARTS, index="start", variable_name="part", value_name="share")
    area = (
        alt.Chart(long)
        .mark_area(interpolate="step-after", fillOpacity=0.7)
        .encode(
            x=_time("start", unit),
            y=alt.Y("share:Q", title="of the time", axis=_axis(".0%"), scale=alt.Scale(domain=[0, 1])),
            color=alt.Color("part:N", scale=alt.Scale(domain=PARTS, range=SERIES)),
            order=alt.Order("rank:Q"),
        )
        .transform_calculate(rank=f"indexof({list(PARTS)}, datum.part)")
    )
    tips = [alt.Tooltip(f"{part}:Q", format=".1%") for part in PARTS]
    return _finished(alt.layer(area, _hover(shares, unit, tips)))


def _time(column: str, unit: str) -> alt.X:
    return alt.X(f"{column}:Q", title=f"time ({unit})", scale=alt.Scale(nice=False, zero=True))


def _hover(frame: pl.DataFrame, unit: str, tips: list[alt.Tooltip]) -> alt.Chart:
    """Spans that are seen only under the pointer, and tell their values."""
    under = alt.selection_point(on="pointerover", clear="pointerout")
    seen = alt.ConditionalParameterValueDefnumberExprRef(param=under.name, value=0.12, empty=False)
    times = [alt.Tooltip(f"{name}:Q", title=f"{name} ({unit})", format=".4~g") for name in ("start", "end")]
    return (
        alt.Chart(frame)
        .mark_rect(fill="var(--text)")
        .encode(
            x=alt.X("start:Q"),
            x2=alt.X2("end:Q"),
            y=alt.YValue(0),
            y2=alt.Y2Value("height"),
            opacity=alt.OpacityValue(0, condition=seen),
            tooltip=[*tips, *times],
        )
        .add_params(under)
    )


# --- distributions and sums --------------------------------------------------------------------------------------


def _first_token(bars: pl.DataFrame) -> Chart:
    text = "From when the engine took a row to its first token: waiting in the queue and computing the prompt."
    return Chart("first_token", "Time to first token", text, _histogram(bars, 0))


def _per_token(bars: pl.DataFrame) -> Chart:
    text = "Each answer's mean time between its tokens after the first."
    return Chart("per_token", "Time per token", text, _histogram(bars, 1))


def _histogram(bars: pl.DataFrame, series: int) -> dict[str, Any]:
    """Of seconds; in milliseconds where these are the better unit."""
    scale, unit = (1000, "ms") if bars["end"].max() <= 1 else (1, "s")  # type: ignore[operator]
    frame = _rounded(bars.with_columns(pl.col("start", "end") * scale))
    return _finished(_bars(frame, f"time ({unit})").mark_bar(color=SERIES[series], binSpacing=1))


def _bars(frame: pl.DataFrame, title: str) -> alt.Chart:
    tips = [
        alt.Tooltip("count:Q", title="answers", format=","),
        alt.Tooltip("start:Q", title="from", format=".4~g"),
        alt.Tooltip("end:Q", title="to", format=".4~g"),
    ]
    return alt.Chart(frame).encode(
        x=alt.X("start:Q", title=title, bin="binned", axis=alt.Axis(grid=False, tickCount=8)),
        x2=alt.X2("end:Q"),
        y=alt.Y("count:Q", title="answers", axis=_axis("~s")),
        tooltip=tips,
    )


def _lengths(frame: pl.DataFrame) -> Chart:
    reasons = frame["reason"].unique(maintain_order=True).to_list()
    colors = alt.Color("reason:N", scale=alt.Scale(domain=reasons, range=SERIES[: len(reasons)]))
    bars = _bars(_rounded(frame), "generated tokens").mark_bar(binSpacing=1).encode(color=colors)
    text = "Tokens of an answer, by why it ended: stop is the model's own end or a stop string, length is max_tokens."
    return Chart("lengths", "Length of answers", text, _finished(bars))


def _sharing(totals: Totals) -> Chart:
    rows = {
        "in all prompts": totals.prompt_tokens,
        "distinct": totals.distinct_prompt_tokens,
        "planned": totals.planned_prompt_tokens,
        "computed": totals.computed_prompt_tokens,
    }
    frame = pl.DataFrame({"what": list(rows), "tokens": list(rows.values())})
    base = alt.Chart(frame).encode(
        x=alt.X("tokens:Q", title="prompt tokens", axis=_axis("~s", grid=True, tickCount=5)),
        y=alt.Y("what:N", title=None, sort=list(rows), axis=alt.Axis(labelColor="var(--text)", labelFontSize=12)),
        tooltip=[alt.Tooltip("what:N", title="prompt tokens"), alt.Tooltip("tokens:Q", format=",")],
    )
    bars = base.mark_bar(height={"band": 0.6}).encode(
        color=alt.Color("what:N", scale=alt.Scale(domain=list(rows), range=["var(--muted)", *SERIES[:3]]), legend=None)
    )
    text = (
        "A prefix that rows share is computed once. More than planned were computed only where sequences had to give "
        "up their memory, or a run was interrupted; fewer where a cache had kept them."
    )
    return Chart("sharing", "Prompt tokens, planned and computed", text, _finished(bars, 130))


def _axis(form: str, **options: Any) -> alt.Axis:
    """Numbers as in 0, 20k, 40k, where d3 alone would write 0k."""
    return alt.Axis(format=form, labelExpr="datum.value ? datum.label : '0'", **options)


def _rounded(frame: pl.DataFrame) -> pl.DataFrame:
    """Five digits, which is more than can be seen, keep the page small."""
    return frame.with_columns(pl.col(pl.Float64).round_sig_figs(5))


def _finished(chart: Any, height: int = HEIGHT) -> dict[str, Any]:
    """The spec, as wide as its place in the page."""
    spec: dict[str, Any] = (
        chart.properties(width="container", height=height).configure(**CONFIG).to_dict(validate=False)
    )
    del spec["$schema"]  # an address, and nothing is to be fetched
    return spec
