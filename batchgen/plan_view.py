"""A job's plan for people: pairs of names and values, and lines."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from batchgen.job_plan import JobPlan, PrefixText
from batchgen.planned import Planned
from batchgen.progress import duration
from batchgen.shown import counted, visible

if TYPE_CHECKING:
    from rich.tree import Tree

SHOWN_FAILURES = 20
LINE = 120


def plan_pairs(plan: JobPlan, spec: str) -> list[tuple[str, str]]:
    """The figures; `spec` is the spec's file, as it was given."""
    figures = plan.figures
    what, new = "rows", ("new tokens at most", f"{figures.max_new_tokens:,}")
    if figures.scored_tokens:
        what, new = "prompts", ("tokens to score", f"{figures.scored_tokens:,}")
    return [
        ("rows", f"{figures.rows:,}"),
        ("answers", f"{figures.answers:,}"),
        *_failures(figures.failures),
        (f"{what} equal to another", f"{figures.duplicate_rows:,}"),
        *([("BOS in the template, not doubled", counted(figures.bos_in_text, "row"))] if figures.bos_in_text else []),
        ("prompt tokens", f"{figures.prompt_tokens:,}"),
        ("distinct prompt tokens", f"{figures.distinct_prompt_tokens:,}, the fewest that can be computed"),
        ("prompt tokens to compute", f"{figures.computed_prompt_tokens:,} ({_saved(plan)})"),
        new,
        ("longest prompt", f"{figures.longest_prompt:,} of {figures.context_length:,} tokens"),
        ("KV memory at the peak", _kv_memory(figures)),
        ("tokenised in", f"{plan.tokenize_seconds:,.1f} s ({plan.tokenize_tokens_per_second:,.0f} tokens/s)"),
        ("time", _time(figures, spec)),
    ]


def _failures(counts: dict[str, int]) -> list[tuple[str, str]]:
    others = {code: count for code, count in counts.items() if code != "prompt_too_long"}
    why = f" ({', '.join(f'{count:,} {code}' for code, count in sorted(others.items()))})" if others else ""
    return [
        ("rows that are too long", f"{counts.get('prompt_too_long', 0):,}"),
        ("rows that fail otherwise", f"{sum(others.values()):,}{why}"),
    ]


def _saved(plan: JobPlan) -> str:
    asked, computed = plan.figures.prompt_tokens - plan.idle_prompt_tokens, plan.figures.computed_prompt_tokens
    if not asked:
        return "no row asks for an answer" if plan.figures.prompt_tokens else "no prompts"
    return f"{max(0.0, 1 - computed / asked):.1%} saved by sharing"


def _kv_memory(figures: Planned) -> str:
    needed, there = figures.kv_pages_needed, figures.kv_pages
    if not needed:
        return "none, as no row runs"
    short = f"; there {'is' if there == 1 else 'are'} {there:,}, so fewer rows run at once" if needed > there else ""
    return f"{size(figures.kv_bytes_needed)} ({counted(needed, 'page')}{short})"


def _time(figures: Planned, spec: str) -> str:
    if figures.generate_seconds is None:
        return f"not known on this machine yet; any run of this model tells, or: batchgen bench {spec}"
    low, high = map(seconds, figures.generate_seconds)
    loading = "" if figures.load_seconds is None else f", after {seconds(figures.load_seconds)} of loading"
    return f"{low} (if answers are short) to {high} (if all take max_tokens){loading}"


def seconds(value: float) -> str:
    """`4.2 s`, `42 s`, `2:03 min` or `1:02:03 h`."""
    if value < 59.5:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    return f"{duration(value)} {'min' if value < 3599.5 else 'h'}"


def plan_notes(plan: JobPlan) -> Iterator[str]:
    """What might surprise in the files or is not in the figures, advice, and the first rows that will fail; those for
    want of KV memory have a note together."""
    yield from plan.notes
    yield from (f"advice: {advice.text}" for advice in plan.advice)
    failing = [row for row in plan.failing_rows if row.failure.code != "resource_error"]
    for row in failing[:SHOWN_FAILURES]:
        name = f" ({row.name})" if row.name else ""
        yield f"row {row.row_index}{name} will fail: {row.failure.code}: {row.failure.message}"
    if len(failing) > SHOWN_FAILURES:
        yield f"... and {len(failing) - SHOWN_FAILURES:,} more (--json lists all)"


def has_prefixes(plan: JobPlan) -> bool:
    return plan.shared_tokens > 0 and plan.figures.computed_prompt_tokens > 0


def prefix_title(plan: JobPlan) -> str:
    shown = sum(node.saved_tokens for node in _walk(plan.prefixes))
    return f"largest shared prefixes ({shown / plan.shared_tokens:.0%} of what sharing saves)"


def prefix_lines(prefix: PrefixText, depth: int = 0) -> Iterator[str]:
    """The tree as indented lines."""
    line = "  " * depth + _label(prefix)
    yield line if len(line) <= LINE else line[: LINE - 1] + "…"
    for child in prefix.children:
        yield from prefix_lines(child, depth + 1)


def prefix_tree(prefix: PrefixText, title: str) -> "Tree":
    """The tree for a terminal."""
    from rich.tree import Tree

    tree = Tree(title)
    _grow(tree, prefix)
    return tree


def _grow(tree: "Tree", prefix: PrefixText) -> None:
    from rich.text import Text

    branch = tree.add(Text(_label(prefix), no_wrap=True, overflow="ellipsis"))
    for child in prefix.children:
        _grow(branch, child)


def _label(prefix: PrefixText) -> str:
    shape = f"{counted(prefix.rows, 'row')} x {counted(prefix.own_tokens, 'token')}"
    figures = f"{shape}, {prefix.saved_tokens:,} saved"
    if not prefix.own_tokens:
        return counted(prefix.rows, "row")
    return f"{figures}: {visible(prefix.text)}" if prefix.text else figures


def _walk(prefix: PrefixText) -> Iterator[PrefixText]:
    yield prefix
    for child in prefix.children:
        yield from _walk(child)


def size(count: int) -> str:
    """Bytes in the unit that fits: `1.5 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
