"""Two jobs beside each other for people, and as JSON."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from batchgen.compare import Comparison, text_difference

SETTING = 60
"""Characters of a setting that are shown."""
MATCHES = ("both", "only_a", "only_b", "equal_texts", "different_texts", "equal_finish_reasons")


def comparison_values(result: Comparison) -> dict[str, Any]:
    """All of it as JSON values."""
    sides = {"a": result.a, "b": result.b}
    return {
        **{name: {"directory": str(side.directory), **side.figures()} for name, side in sides.items()},
        "same_input": result.same_input,
        "settings": [{"name": name, "a": a, "b": b} for name, a, b in result.settings],
        "answers": {name: getattr(result, name) for name in MATCHES},
        "differences": [asdict(difference) for difference in result.differences],
    }


def comparison_columns(result: Comparison) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: the settings that differ, then the figures that are not zero in both, and their ratio."""
    a, b = result.a.figures(), result.b.figures()
    names = [name for name in a if name == "rows" or a[name] or b[name]]
    settings = [[name, *_settings(first, second), ""] for name, first, second in result.settings]
    figures = [[name.replace("_", " "), _figure(a[name]), _figure(b[name]), _ratio(a[name], b[name])] for name in names]
    return ["", str(result.a.directory), str(result.b.directory), "B / A"], [*settings, *figures]


def answer_pairs(result: Comparison) -> list[tuple[str, str]]:
    share = f" ({result.different_texts / result.both:.1%})" if result.both else ""
    return [
        ("in both", f"{result.both:,}"),
        ("only in A, only in B", f"{result.only_a:,}, {result.only_b:,}"),
        ("texts that differ", f"{result.different_texts:,}{share}"),
        ("finish reasons that differ", f"{result.both - result.equal_finish_reasons:,}"),
    ]


def difference_lines(result: Comparison) -> Iterator[str]:
    """The first texts that differ, from where they do."""
    for found in result.differences:
        sample = f", answer {found.sample_index}" if found.sample_index else ""
        yield f"row {found.row_index}{sample}: the same for {found.same:,} characters, then"
        yield f"  A: {_quoted(found.a)}"
        yield f"  B: {_quoted(found.b)}"
    if result.different_texts > len(result.differences):
        yield f"... and {result.different_texts - len(result.differences):,} more"


def _settings(*values: Any) -> list[str]:
    """The two values of a setting; where one of them is long, both from where they part."""
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    if max(map(len, texts)) <= SETTING:
        return texts
    found = text_difference(0, 0, *texts)
    return [found.a or "", found.b or ""]


def _figure(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _ratio(a: float | None, b: float | None) -> str:
    return f"{b / a:.2f}" if a and b else ""


def _quoted(text: str | None) -> str:
    return "no text" if text is None else json.dumps(text, ensure_ascii=False)
