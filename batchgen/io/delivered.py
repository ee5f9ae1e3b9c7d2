"""A finished job read back from its directory: tables of any size, looked at lazily."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
from pydantic import BaseModel, ValidationError

from batchgen.errors import OutputError
from batchgen.io.checkpoint import read_job
from batchgen.io.schemas import DELIVERED, RESULTS


class _Spec(BaseModel):
    name: str
    model: dict[str, Any]
    input: dict[str, Any]
    output: dict[str, Any]


class _Plan(BaseModel):
    distinct_prompt_tokens: int
    computed_prompt_tokens: int
    kv_pages: int
    generate_seconds: tuple[float, float] | None


class _Totals(BaseModel):
    rows: int
    failed_rows: int
    prompt_tokens: int
    computed_prompt_tokens: int
    restored_prompt_tokens: int
    generated_tokens: int
    plan_seconds: float
    load_seconds: float
    compile_seconds: float
    generate_seconds: float
    wall_seconds: float


class _Record(BaseModel):
    """What readers of a finished job take from its job.json."""

    started: str
    spec: _Spec
    identity: dict[str, Any]
    threads: int
    model: dict[str, Any]
    numerics: dict[str, Any]
    versions: dict[str, str]
    cpu: dict[str, Any]
    plan: _Plan
    preemptions: int
    totals: _Totals


@dataclass(frozen=True, slots=True)
class DeliveredJob:
    """The tables of a job directory whose job is finished. `record` is its job.json."""

    directory: Path
    record: Mapping[str, Any]

    @classmethod
    def open(cls, directory: Path) -> "DeliveredJob":
        """Raises OutputError for what is no job's directory, or one whose job is not finished."""
        if not directory.is_dir():
            what = "is a file" if directory.exists() else "no such directory"
            raise OutputError(f"{directory}: {what}; name the output folder of a job")
        record = read_job(directory)
        if record is None:
            raise OutputError(f"{directory}: holds no batchgen job; name the output folder of a job")
        if record.get("state") != "finished":
            raise OutputError(
                f"{directory}: the job is not finished; run the command that started it again, it goes on"
            )
        _check_record(directory / "job.json", record)
        for kind in ("results", "steps"):
            if not _parts(directory, kind):
                raise OutputError(f"{directory}: {kind}/ is missing; --fresh runs the job again")
        return cls(directory, record)

    @property
    def name(self) -> str:
        return str(self.record["spec"]["name"])

    @property
    def _own(self) -> pa.Schema:
        """The result columns, without the prefix."""
        return DELIVERED[self.record["spec"].get("task", {}).get("kind", "generate")]

    def results(self) -> pl.LazyFrame:
        """The columns of `RESULTS`, under these names whatever `output.prefix` is.

        Of a task that scores they are filled in as far as they mean something: the text is the choice, if one was made.
        """
        prefix, own = self.record["spec"]["output"]["prefix"], self._own
        found = self.table("results").select(pl.col(prefix + name).alias(name) for name in own.names)
        return found if own is RESULTS else found.select(**_as_answers(own))

    def steps(self) -> pl.LazyFrame:
        return self.table("steps")

    def timings(self) -> pl.LazyFrame | None:
        """None where the job was told to keep none."""
        return self.table("timings") if _parts(self.directory, "timings") else None

    def input_schema(self) -> Mapping[str, pl.DataType]:
        """The columns of results/ that are not results: the input's, and what was added since."""
        prefix = self.record["spec"]["output"]["prefix"]
        own = {prefix + name for name in self._own.names}
        return {name: kind for name, kind in self.table("results").collect_schema().items() if name not in own}

    def input_rows(self, row_index: Sequence[int], columns: Sequence[str]) -> dict[int, dict[str, Any]]:
        """Some rows' values by row_index, read by pyarrow, which holds every type that an input can have."""
        key = self.record["spec"]["output"]["prefix"] + "row_index"
        parts = ds.dataset(_parts(self.directory, "results"))
        table = parts.to_table(columns=[*columns, key], filter=ds.field(key).isin(pa.array(row_index, pa.int64())))
        rows = table[key].to_pylist()
        return {row: {name: _value(table[name][i]) for name in columns} for i, row in enumerate(rows)}

    def table(self, kind: str) -> pl.LazyFrame:
        """The parts of a table as they are written."""
        return pl.scan_parquet(_parts(self.directory, kind), glob=False)


def _as_answers(own: pa.Schema) -> dict[str, pl.Expr]:
    """`RESULTS` by expressions on the columns of a task that scores."""
    known = {name: pl.col(name) for name in own.names if name in RESULTS.names}
    empty = pl.from_arrow(RESULTS.empty_table())
    assert isinstance(empty, pl.DataFrame)
    missing: dict[str, pl.Expr] = {name: pl.lit(None, kind) for name, kind in empty.schema.items()}
    missing["num_generated_tokens"] = pl.lit(0, pl.Int32)
    if "choice" in own.names:
        chosen = pl.col("choice_scores").list.get(pl.col("choice"), null_on_oob=True).struct
        known |= {"text": chosen.field("text"), "cumulative_logprob": chosen.field("logprob")}
    if "logprob_sum" in own.names:
        known["cumulative_logprob"] = pl.col("logprob_sum")
    return {name: known.get(name, missing[name]) for name in RESULTS.names}


def _check_record(path: Path, record: Mapping[str, Any]) -> None:
    try:
        _Record.model_validate(record)
    except ValidationError as error:
        wrong = error.errors()[0]
        place, lacks = ".".join(map(str, wrong["loc"])), wrong["type"] == "missing"
        what = f"lacks {place}" if lacks else f"is damaged: {place}: {wrong['msg']}"
        raise OutputError(f"{path} {what}; --fresh runs the job again") from None


def _parts(directory: Path, kind: str) -> list[Path]:
    """None where there is no such folder; OutputError for one that cannot be looked into."""
    folder = directory / kind
    try:
        return sorted(path for path in folder.iterdir() if path.match("part-*.parquet"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise OutputError(f"{folder} cannot be read: {error.strerror}") from None


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except Exception:  # a year 10000, say; pyarrow raises what it likes here
        return f"(a {scalar.type} that Python cannot hold)"


@contextmanager
def reading(*directories: Path) -> Iterator[None]:
    """Turns damaged tables below one of the directories into an OutputError of one line."""
    places = " or ".join(map(str, directories))
    try:
        yield
    except PermissionError as error:
        reason = error.strerror or (str(error).splitlines() or ["not allowed"])[0]  # polars' errors have no strerror
        raise OutputError(f"{error.filename or places}: its tables cannot be read: {reason}") from error
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OutputError(f"{places}: its tables cannot be read: {reason}; --fresh runs the job again") from error
