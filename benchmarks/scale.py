"""How batchgen plans large tables: its rates, and the memory that it takes.

    python -m benchmarks.scale --rows 1000000 --tokens 500
    python -m benchmarks.scale --rows 10000000 --tokens 200 --token-ids
    python -m benchmarks.scale --scheduler

A table is made up (seeded): 9 of 10 rows have a system prompt, one of 1,000 documents and a question of their own,
which are a fifth, half and three tenths of the tokens; the others share nothing. Its words are those of the texts in
`data/` and `jobs/data/`, as frequent as there. It is read, tokenised and planned by the functions that a job uses, and
the figures are printed as JSON: `plan_seconds` is what passes after the last row is tokenised, `least_tokens` are those
that have to be computed going by how the table was made. With `--token-ids` the table holds token ids instead of
texts (drawn from those of the words), so that everything but tokenising is measured.

Memory is looked at 20 times a second: `anonymous` is the process's own, `total` has the files mapped into it besides.
With `--run` the whole job is run, up to its report, but for the model, which draws the same token each time, four for a
row: what is measured is the memory of a job, and what it costs a row outside of its model.
With `--scheduler` an engine without a model is given so many requests at once and the time per step is printed.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchgen import runner
from batchgen.engine.engine import Engine, EngineLimits
from batchgen.engine.requests import make_requests
from batchgen.engine.types import Request, Sample, SamplingParams
from batchgen.io.scratch import Scratch
from batchgen.kernels.base import Backend, StepBatch, StepResult
from batchgen.loading import LoadedModel, ModelFile, open_device, open_model
from batchgen.prepare import PreparedJob, open_job, prepare
from batchgen.progress import SilentProgress
from batchgen.spec import JobSpec, load_spec
from batchgen.text.tokenizer import Tokenizer
from batchgen.yaml_text import write_yaml
from benchmarks.workloads import DATA, MODEL, model_path

DOCUMENTS = 1000
UNSHARED = 0.1
GROUP_ROWS = 1 << 14
ANNOTATE = DATA.parent.parent / "jobs" / "data" / "annotate.parquet"

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of a row's parts, in words or tokens."""

    system: int
    document: int
    question: int

    @classmethod
    def of(cls, total: int) -> "Lengths":
        system, document = total // 5, total // 2
        return cls(system, document, total - system - document)

    @property
    def total(self) -> int:
        return self.system + self.document + self.question


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some rows of the table: which document each has (-1: it shares nothing), and the words of its own."""

    documents: Numbers
    own: Numbers  # (rows, all of a row's words), of which shared rows use the last few


class Made:
    """A made-up table in numbers of words (or of tokens): the parts that are shared, and rows as they are wanted."""

    def __init__(self, lengths: Lengths, choices: int):
        self.lengths = lengths
        self._rng, self._choices = np.random.default_rng(7), choices
        self.system = self._draw(1, lengths.system)[0]
        self.documents = self._draw(DOCUMENTS, lengths.document)

    def rows(self, count: int) -> Iterator[Rows]:
        for first in range(0, count, GROUP_ROWS):
            size = min(GROUP_ROWS, count - first)
            documents = self._rng.integers(0, DOCUMENTS, size)
            documents[self._rng.random(size) < UNSHARED] = -1
            yield Rows(documents, self._draw(size, self.lengths.total))

    def _draw(self, rows: int, columns: int) -> Numbers:
        return self._rng.integers(0, self._choices, (rows, columns))


def corpus() -> list[str]:
    """The words of the texts at hand, each as often as it is there."""
    messages = pl.read_parquet(ANNOTATE)["messages"].explode().struct.field("content").to_list()
    questions = pl.read_parquet(DATA / "choices.parquet")["question"].to_list()
    return " ".join([*messages, *questions]).split()


def encode(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    return tokenizer.encode_batch([text], parse_special=False, add_bos=False)[0]


def write_texts(path: Path, tokenizer: Tokenizer, rows: int, tokens: int) -> dict[str, Any]:
    """Columns `document` and `question`; the system prompt is in the spec's template, which is returned."""
    words = np.array(corpus(), object)
    per_word = len(encode(tokenizer, " ".join(words))) / len(words)
    made = Made(Lengths.of(round(tokens / per_word)), len(words))

    def text(numbers: Numbers) -> str:
        return " ".join(words[numbers])

    documents = [text(document) for document in made.documents]

    def groups() -> Iterator[pa.Table]:
        last = -made.lengths.question
        for part in made.rows(rows):
            pairs = [
                (documents[number], text(own[last:])) if number >= 0 else (text(own[:last]), text(own[last:]))
                for number, own in zip(part.documents.tolist(), part.own, strict=True)
            ]
            yield pa.table({"document": [d for d, _ in pairs], "question": [q for _, q in pairs]})

    _write(path, groups())
    return {"prompt": text(made.system) + "\n{{ document }}\n{{ question }}", "chat": False}


def write_ids(path: Path, tokenizer: Tokenizer, rows: int, tokens: int) -> dict[str, Any]:
    """A column `ids`."""
    known = encode(tokenizer, " ".join(corpus()))
    made = Made(Lengths.of(tokens), len(known))

    def groups() -> Iterator[pa.Table]:
        for part in made.rows(rows):
            shared = part.documents >= 0
            part.own[shared, : made.lengths.system] = made.system
            begin, end = made.lengths.system, made.lengths.system + made.lengths.document
            part.own[shared, begin:end] = made.documents[part.documents[shared]]
            ids = pa.FixedSizeListArray.from_arrays(pa.array(known[part.own.reshape(-1)]), tokens)
            yield pa.table({"ids": ids.cast(pa.list_(pa.int32()))})

    _write(path, groups())
    return {"token_ids": "ids"}


def _write(path: Path, groups: Iterator[pa.Table]) -> None:
    first = next(groups)
    with pq.ParquetWriter(path, first.schema, compression="zstd", compression_level=1) as writer:
        writer.write_table(first)
        for group in groups:
            writer.write_table(group)


class Memory:
    """The most memory that this process had from `with` on, in bytes, by kind."""

    def __enter__(self) -> "Memory":
        self.anonymous = self.total = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        ended = False
        while not ended:
            lines = Path("/proc/self/status").read_text().splitlines()
            sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")}
            self.anonymous = max(self.anonymous, sizes["RssAnon"])
            self.total = max(self.total, sum(sizes.values()))
            ended = self._ended.wait(0.05)


def measure(folder: Path, rows: int, tokens: int, token_ids: bool, whole_job: bool, model: str) -> dict[str, Any]:
    """Make the table in `folder`, then read and plan it, or run it."""
    write = write_ids if token_ids else write_texts
    given = write(folder / "rows.parquet", open_model(model_path(model)).tokenizer, rows, tokens)
    (folder / "job.yaml").write_text(
        write_yaml(
            {
                "model": {"source": model},
                "input": {"path": str(folder / "rows.parquet"), **given},
                "sampling": {"max_tokens": 4 if whole_job else 32},
                "output": {"path": str(folder / "out")},
            }
        ),
        encoding="utf-8",
    )
    spec = load_spec(folder / "job.yaml", [])
    opened = open_job(spec, lambda text: None)
    if whole_job:
        return _run(spec)
    with Scratch(folder) as scratch, Memory() as memory:
        begun = time.perf_counter()
        job = prepare(opened, open_device(opened.model, opened.numerics, opened.spec.engine), scratch)
        seconds = time.perf_counter() - begun
        request_us = _request_us(job)
    return {
        **_counts(job, tokens),
        "tokenize_seconds": round(job.prompts.tokenize_seconds, 1),
        "tokenize_tokens_per_second": round(job.prompts.tokens_per_second),
        "plan_seconds": round(seconds - job.prompts.tokenize_seconds, 1),
        "request_us": round(request_us, 1),
        "peak_anonymous_gb": round(memory.anonymous / 1e9, 2),
        "peak_total_gb": round(memory.total / 1e9, 2),
    }


def _run(spec: JobSpec) -> dict[str, Any]:
    """The job without its model."""

    def load(model: ModelFile, backend: Backend, *_: Any) -> LoadedModel:
        backend.run = NoModel().run  # type: ignore[method-assign]
        return LoadedModel(backend, 0.0, 0.0)

    runner.load_model = load  # type: ignore[assignment]
    with Memory() as memory:
        totals = runner.run_job(spec, fresh=False, progress=SilentProgress(), stop=lambda: False).totals
    return {
        **{name: totals[name] for name in ("rows", "plan_seconds", "tokenize_seconds", "generate_seconds")},
        **{name: totals[name] for name in ("wall_seconds", "generated_tokens", "computed_prompt_tokens")},
        "peak_anonymous_gb": round(memory.anonymous / 1e9, 2),
        "peak_total_gb": round(memory.total / 1e9, 2),
    }


def _counts(job: PreparedJob, tokens: int) -> dict[str, Any]:
    prompts, lengths = job.prompts.table, Lengths.of(tokens)
    least = lengths.system + DOCUMENTS * lengths.document
    least += round(len(prompts) * (UNSHARED * tokens + (1 - UNSHARED) * lengths.question))
    return {
        "rows": len(job.prompts.row_index),
        "failed_rows": len(job.prompts.failures),
        "prompt_tokens": job.plan.prompt_tokens,
        "planned_tokens": job.plan.trie_tokens,
        "least_tokens": least,
        "runs": len(prompts.runs),
    }


def _request_us(job: PreparedJob, count: int = 100_000) -> float:
    """Microseconds to make one of the first requests."""
    begun = time.perf_counter()
    requests = make_requests(job.prompts.table, job.plan, job.order, job.prompts.wishes.__getitem__)
    made = sum(1 for _ in islice(requests, count))
    return (time.perf_counter() - begun) / max(made, 1) * 1e6


# --- the scheduler ----------------------------------------------------------------------------------------------


class NoModel:
    """A backend that always draws token 1."""

    kernel = "none"

    def run(self, batch: StepBatch) -> StepResult:
        count = len(batch.samples)
        return StepResult(np.ones(count, np.int32), np.zeros(count, np.float32), np.zeros((0, 0), np.float32))


class NoText:
    eos_token_ids = frozenset[int]()

    def decode(self, ids: NDArray[np.int32]) -> str:
        return ""


def scheduler_step_us(waiting: int, steps: int = 200) -> float:
    """Median microseconds that an engine spends scheduling a step while so many requests wait."""
    limits = EngineLimits(2048, 256, 4096, 32, 8192, 49152)
    engine = Engine(NoModel(), NoText(), limits)  # type: ignore[arg-type]
    params, header = SamplingParams(max_tokens=16), np.arange(64, dtype=np.int32)
    for number in range(waiting + steps * 64):
        prompt = np.append(header, np.array([number // 49152, number % 49152], np.int32))
        engine.submit(Request(prompt, (Sample(params, ((number, 0),)),)))
    spent = [record.schedule_ns for _, record in (engine.step() for _ in range(steps)) if record is not None]
    return median(spent) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=500, help="of a row, about")
    parser.add_argument("--token-ids", action="store_true", help="a table of token ids instead of texts")
    parser.add_argument("--run", action="store_true", help="run the job, too, without a model")
    parser.add_argument("--scheduler", action="store_true", help="measure the scheduler, not a table")
    parser.add_argument("--folder", help="where table and tokens are put for the while (default: the system's)")
    parser.add_argument("--model", default=MODEL)
    args = parser.parse_args()
    if args.scheduler:
        print(json.dumps({f"{n}_waiting_us_per_step": round(scheduler_step_us(n), 1) for n in (10**3, 10**5, 10**6)}))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print(json.dumps(measure(Path(folder), args.rows, args.tokens, args.token_ids, args.run, args.model), indent=2))


if __name__ == "__main__":
    main()
