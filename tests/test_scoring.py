"""Tasks that score, on the real model: against transformers in float32, the harness's rules, and any way to run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from batchgen.compare import compare_jobs
from batchgen.io.delivered import DeliveredJob
from batchgen.io.schemas import RESULTS
from batchgen.job_plan import plan_job
from batchgen.loading import ModelFile
from batchgen.progress import SilentProgress
from batchgen.report.page import write_report
from batchgen.runner import run_job
from batchgen.spec import JobSpec, load_spec
from tests.conftest import DATA, ROOT

REFERENCE = DATA / "job" / "smollm2_greedy.parquet"
PLAIN = {"chat": False, "parse_special": True}
TIMES = ("queued_s", "prefill_s", "decode_s")


def results(spec: JobSpec) -> pl.DataFrame:
    return pl.read_parquet(Path(spec.output.path) / "results" / "*.parquet")


def record(spec: JobSpec) -> dict[str, Any]:
    return json.loads((Path(spec.output.path) / "job.json").read_text())


def check_plan(spec: JobSpec) -> None:
    """What was planned is what was computed, and what the results say."""
    figures, job, frame = plan_job(spec, SilentProgress()).figures, record(spec), results(spec)
    totals = job["totals"]
    assert figures.computed_prompt_tokens == job["plan"]["computed_prompt_tokens"] == totals["computed_prompt_tokens"]
    assert figures.prompt_tokens == totals["prompt_tokens"] == frame["num_prompt_tokens"].sum()
    assert figures.scored_tokens == totals["scored_tokens"] > 0
    assert totals["generated_tokens"] == figures.max_new_tokens == 0
    if spec.engine.prefix_sharing:
        assert figures.computed_prompt_tokens == figures.distinct_prompt_tokens
        assert figures.prompt_tokens - frame["num_cached_tokens"].sum() == figures.computed_prompt_tokens


# Against transformers


COLUMNS = ["id", "prompt_text", "continuation_text", "continuation_token_ids"]
VALUES = ["continuation_logprob", "continuation_is_greedy"]


@pytest.mark.parametrize("kind", ["texts", "token ids"])
def test_float32_gives_the_reference_scores(make_spec, run, kind: str) -> None:
    """Where a rendered chat ends with a newline, that is scored before the reference's tokens, as the harness does."""
    given: dict[str, Any] = {"path": str(REFERENCE), "where": "continuation_text is not null"}
    given |= {"prompt": "{{ prompt_text }}", **PLAIN} if kind == "texts" else {"token_ids": "prompt_token_ids"}
    field = "continuation_text" if kind == "texts" else "continuation_token_ids"
    task = {"kind": "score", "continuation": f"{{{{ {field} }}}}"}
    spec = make_spec(input=given, task=task, model={"weights": "fp32"}, output={"columns": [*COLUMNS, *VALUES]})
    run(spec)
    frame = results(spec)
    for row in frame.iter_rows(named=True):
        expected, logprobs = row["continuation_token_ids"], row["token_logprobs"]
        moved = row["prompt_text"][len(row["prompt_text"].rstrip()) :] if kind == "texts" else ""
        assert row["token_ids"][-len(expected) :] == expected, row["id"]
        assert len(row["token_ids"]) - len(expected) == bool(moved)
        assert abs(sum(logprobs[-len(expected) :]) - row["continuation_logprob"]) < 1e-3 * len(expected)
        assert moved or row["is_greedy"] == row["continuation_is_greedy"]
        assert row["logprob_sum"] == pytest.approx(sum(logprobs), rel=1e-12)
        assert row["num_continuation_tokens"] == len(row["token_ids"]) == len(logprobs)
        assert row["num_continuation_bytes"] == len((moved + row["continuation_text"]).encode())
    assert frame.height == 16 and frame["is_greedy"].any() and not frame["is_greedy"].all()
    check_plan(spec)


def test_float32_gives_the_greedy_answers_their_log_probabilities(make_spec, run) -> None:
    """As token ids, which are used as they are; each is its own likeliest continuation."""
    given = {"path": str(REFERENCE), "token_ids": "prompt_token_ids"}
    task = {"kind": "score", "continuation": "{{ greedy_token_ids }}"}
    given["limit"] = 8
    columns = ["greedy_token_ids", "greedy_logprobs"]
    spec = make_spec(input=given, task=task, model={"weights": "fp32"}, output={"columns": columns})
    run(spec)
    for row in results(spec).iter_rows(named=True):
        np.testing.assert_allclose(row["token_logprobs"], row["greedy_logprobs"], atol=1e-3)
        assert row["is_greedy"] and row["token_ids"] == row["greedy_token_ids"]
    assert results(spec).height == 8


# The same bits


WAYS: dict[str, dict[str, Any]] = {
    "small chunks": {"max_batch_tokens": 37},
    "few logits at a time": {"max_num_seqs": 5},
    "without sharing": {"prefix_sharing": False},
    "one by one": {"max_num_seqs": 1, "max_batch_tokens": 64},
    "in the table's order": {"schedule": "fifo"},
    "prompts first": {"schedule": "prefill_first"},
    "one thread": {"threads": 1},
}


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Rows of three questions each with choices that begin alike, single tokens, equal ones and a choice that begins
    another; and rows that fail."""
    texts = ["The capital of France is", "The capital of Italy is the city of", "Two and two are"] * 2
    choices = [
        [" Paris", " Rome", " Berlin"],
        [" Rome, of course", " Rome, as all know", " Rome"],
        [" four", " five", " four", " fifty-five apples"],
        [" Paris", " London"],
        None,
        [" four", ""],
    ]
    frame = pl.DataFrame({"text": texts, "options": choices, "right": [0, 2, 0, 1, 0, 0]})
    frame.write_parquet(tmp_path / "questions.parquet")
    return tmp_path / "questions.parquet"


def choose(questions: Path, **task: Any) -> dict[str, Any]:
    given = {"path": str(questions), "prompt": "{{ text }}", "chat": False}
    return {"input": given, "task": {"kind": "choose", "choices": "options", "answer": "right", **task}}


def comparable(frame: pl.DataFrame) -> list[Any]:
    """All but times and what was shared; floats by their value, to the last bit."""
    return frame.drop(*TIMES, "num_cached_tokens").to_dicts()


def test_scores_are_the_same_bits_however_they_are_run(make_spec, run, questions: Path) -> None:
    plain = make_spec("plain", **choose(questions))
    run(plain)
    check_plan(plain)
    for number, (way, engine) in enumerate(WAYS.items()):
        spec = make_spec(f"way{number}", **choose(questions), engine=engine)
        run(spec)
        assert comparable(results(spec)) == comparable(results(plain)), way
        check_plan(spec)


def test_a_score_is_what_the_engine_gives_when_it_draws_that_token(make_spec, run, tmp_path: Path) -> None:
    """To the bit, the model's own greedy answer scored."""
    frame = pl.DataFrame({"q": ["The capital of France is", "Once upon a time"]})
    frame.write_parquet(tmp_path / "rows.parquet")
    given = {"path": str(tmp_path / "rows.parquet"), "prompt": "{{ q }}"}
    drawn = make_spec("drawn", input=given, sampling={"max_tokens": 12, "ignore_eos": True})
    run(drawn)
    frame.with_columns(ids=results(drawn)["token_ids"]).write_parquet(tmp_path / "answers.parquet")
    given = {"path": str(tmp_path / "answers.parquet"), "prompt": "{{ q }}"}
    scored = make_spec("scored", input=given, task={"kind": "score", "continuation": "{{ ids }}"})
    run(scored)
    timings = pl.read_parquet(Path(drawn.output.path) / "timings" / "*.parquet").sort("row_index", "token_index")
    for row in results(scored).iter_rows(named=True):
        expected = timings.filter(row_index=row["row_index"])["logprob"].to_list()
        assert row["token_logprobs"] == expected and row["is_greedy"]


# Choosing


def test_choices_are_rated_and_the_right_ones_counted(make_spec, run, questions: Path) -> None:
    spec = make_spec(**choose(questions))
    summary = run(spec)
    frame = results(spec)
    assert frame["row_index"].to_list() == list(range(6)) and (summary.rows, summary.failed_rows) == (6, 2)
    good = frame.filter(pl.col("error").is_null())
    assert good.height == 4 and set(good["finish_reason"]) == {"stop"}
    for row in good.iter_rows(named=True):
        rated = row["choice_scores"]
        assert [choice["text"] for choice in rated] == row["options"]
        for choice in rated:
            assert choice["num_bytes"] == len(choice["text"].encode())
            assert choice["logprob_per_byte"] == choice["logprob"] / choice["num_bytes"]
            assert choice["logprob_per_token"] == choice["logprob"] / choice["num_tokens"]
        for way in ("", "_per_byte", "_per_token"):
            of_choices = [choice[f"logprob{way}"] for choice in rated]
            assert row[f"choice{way}"] == of_choices.index(max(of_choices))  # of equal ones the first
            assert row[f"is_correct{way}"] == (row[f"choice{way}"] == row["right"])
    four = good.row(2, named=True)["choice_scores"]
    assert four[0] == four[2] and four[0]["is_greedy"] == four[2]["is_greedy"]  # equal choices, equal scores
    for way in ("", "_per_byte", "_per_token"):
        assert summary.totals[f"accuracy{way}"] == good[f"is_correct{way}"].mean()
    failed = frame.filter(pl.col("error").is_not_null())
    assert failed["error"].to_list() == [
        {"code": "prompt_missing", "message": "column 'options' is null"},
        {"code": "prompt_missing", "message": "choice 1 is empty"},
    ]
    assert failed["choice"].to_list() == [None, None] and failed["is_correct"].to_list() == [None, None]


def test_a_choice_is_scored_as_a_continuation_of_its_own(make_spec, run, questions: Path, tmp_path: Path) -> None:
    chosen = make_spec("chosen", **choose(questions))
    run(chosen)
    frame = results(chosen).filter(pl.col("error").is_null()).select("text", "options", "choice_scores")
    each = frame.explode("options", "choice_scores").rename({"options": "option"})
    each.write_parquet(tmp_path / "each.parquet")
    given = {"path": str(tmp_path / "each.parquet"), "prompt": "{{ text }}", "chat": False}
    scored = make_spec("scored", input=given, task={"kind": "score", "continuation": "{{ option }}"})
    run(scored)
    for row in results(scored).iter_rows(named=True):
        assert row["logprob_sum"] == row["choice_scores"]["logprob"]
        assert row["num_continuation_tokens"] == row["choice_scores"]["num_tokens"]
        assert row["is_greedy"] == row["choice_scores"]["is_greedy"]


def test_a_fixed_list_of_choices_and_a_chat_template(make_spec, run, tmp_path: Path) -> None:
    """Single tokens: nothing is computed but the prompts."""
    frame = pl.DataFrame({"q": ["Is fire hot?", "Is ice hot?"], "label": ["Yes", "No"]})
    frame.write_parquet(tmp_path / "rows.parquet")
    given = {"path": str(tmp_path / "rows.parquet"), "prompt": "{{ q }} Yes or no?"}
    task = {"kind": "choose", "choices": ["Yes", "No"], "answer": "label"}
    spec = make_spec(input=given, task=task)
    run(spec)
    check_plan(spec)
    for row in results(spec).iter_rows(named=True):
        assert [choice["text"] for choice in row["choice_scores"]] == ["Yes", "No"]
        assert row["is_correct"] == (["Yes", "No"][row["choice"]] == row["label"])
    # the newline that ends the rendered prompt moves to the choices, as the harness has it
    assert results(spec)["choice_scores"][0][0]["num_tokens"] == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (7, "column 'right': 7 is none of the 3 choices"),
        (None, "column 'right': None is none of the 3 choices"),
    ],
)
def test_an_answer_that_is_no_choice_fails_its_row(make_spec, run, questions, tmp_path, answer, message) -> None:
    frame = pl.read_parquet(questions).head(1).with_columns(right=pl.lit(answer, pl.Int64))
    frame.write_parquet(tmp_path / "bad.parquet")
    spec = make_spec(**choose(tmp_path / "bad.parquet"))
    assert run(spec).failed_rows == 1
    assert results(spec)["error"].to_list() == [{"code": "schema_error", "message": message}]


# Reports


TASKS: dict[str, dict[str, Any]] = {
    "score": {"kind": "score", "continuation": "{{ text }}"},
    "choose": {"kind": "choose", "choices": "options", "answer": "right"},
    "perplexity": {"kind": "perplexity"},
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_finished_jobs_are_reported_and_compared(make_spec, run, questions: Path, task: dict[str, Any]) -> None:
    spec = make_spec(**choose(questions) | {"task": task, "output": {"prefix": "out_", "columns": ["options"]}})
    totals = run(spec).totals
    directory = Path(spec.output.path)
    delivered = DeliveredJob.open(directory)
    answers = delivered.results().collect()
    assert answers.columns == RESULTS.names and answers["cumulative_logprob"].drop_nulls().max() < 0
    assert list(delivered.input_schema()) == ["options"]
    assert write_report(directory).path.stat().st_size > 100_000
    found = compare_jobs(directory, directory)
    assert found.equal_texts == found.both == 6
    if task["kind"] == "choose":
        rows = delivered.table("results").collect().iter_rows(named=True)
        assert answers["text"].to_list() == [
            None if row["out_choice"] is None else row["options"][row["out_choice"]] for row in rows
        ]
        assert found.a.accuracy == totals["accuracy"]


# Going on


def test_a_job_that_scores_goes_on_where_it_stopped(make_spec, run, questions: Path) -> None:
    whole = make_spec("whole", **choose(questions), engine={"max_num_seqs": 2})
    run(whole)
    spec = make_spec("parts", **choose(questions), engine={"max_num_seqs": 2})
    spec = spec.model_copy(update={"output": spec.output.model_copy(update={"part_rows": 1})})
    steps = iter(range(100))
    assert run(spec, stop=lambda: next(steps) >= 3).interrupted
    summary = run(spec)
    assert not summary.interrupted and comparable(results(spec)) == comparable(results(whole))
    assert summary.totals["scored_tokens"] == record(whole)["totals"]["scored_tokens"]


def test_another_task_is_another_job(make_spec, questions: Path) -> None:
    one, other = make_spec(**choose(questions)), make_spec(**choose(questions, delimiter=" "))
    assert one.result_hash() != other.result_hash()


# Long contexts


def test_a_long_context_is_cut_on_the_left(make_spec, run, model: ModelFile, tmp_path: Path) -> None:
    """So that `max_length` tokens are seen, as in the harness; a continuation that is longer fails."""
    texts = ["a b c d e f g h i j k l", "i j k l", "k l"]
    pl.DataFrame({"q": texts, "c": [" m n", " m n", " m" * 11]}).write_parquet(tmp_path / "rows.parquet")
    given = {"path": str(tmp_path / "rows.parquet"), "prompt": "{{ q }}", "chat": False}
    spec = make_spec(input=given, task={"kind": "score", "continuation": "{{ c }}", "max_length": 5})
    run(spec)
    long, short, failed = results(spec).to_dicts()
    assert (long["truncated_tokens"], short["truncated_tokens"]) == (8, 0)
    assert (long["num_prompt_tokens"], short["num_prompt_tokens"]) == (5, 5)
    whole = model.tokenizer.encode_batch([texts[0] + " m n"], parse_special=False)[0]
    alone = make_spec("alone", input=ids_table(tmp_path, [whole[-6:-2].tolist()], [whole[-2:].tolist()]), task=IDS)
    run(alone)
    assert results(alone)["token_logprobs"][0].to_list() == long["token_logprobs"]
    assert failed["error"] == {
        "code": "prompt_too_long",
        "message": "the continuation has 11 tokens; 5 can be seen at a time",
    }


IDS = {"kind": "score", "continuation": "{{ continuation }}"}


def ids_table(folder: Path, contexts: list[list[int]], continuations: list[list[int]]) -> dict[str, Any]:
    pl.DataFrame({"ids": contexts, "continuation": continuations}).write_parquet(folder / "ids.parquet")
    return {"path": str(folder / "ids.parquet"), "token_ids": "ids"}


# Rolling


def test_perplexity_is_that_of_every_token_once_in_the_harness_windows(make_spec, run, model, tmp_path: Path) -> None:
    """Each window scored by itself gives the same bits."""
    text = "One two three four five six seven eight nine ten eleven twelve thirteen. \u00e9\u00e0 \U0001f642"
    pl.DataFrame({"text": [text, "short", ""]}).write_parquet(tmp_path / "texts.parquet")
    given = {"path": str(tmp_path / "texts.parquet"), "prompt": "{{ text }}"}
    spec = make_spec(input=given, task={"kind": "perplexity", "stride": 3, "max_length": 8})
    summary = run(spec)
    long, short, empty = results(spec).to_dicts()
    check_plan(spec)
    ids = model.tokenizer.encode_batch([text], parse_special=False, add_bos=False)[0].tolist()
    windows = list(harness_windows(ids, model.tokenizer.bos_token_id, 8, 8 - 3 + 1))
    alone = make_spec("alone", input=ids_table(tmp_path, *zip(*windows, strict=True)), task=IDS)
    run(alone)
    assert long["token_ids"] == ids
    assert long["token_logprobs"] == results(alone)["token_logprobs"].explode().to_list()
    assert long["logprob_sum"] == pytest.approx(results(alone)["logprob_sum"].sum(), rel=1e-12)
    assert long["num_continuation_tokens"] == len(ids) and long["num_continuation_bytes"] == len(text.encode())
    assert long["perplexity"] == pytest.approx(np.exp(-long["logprob_sum"] / len(ids)))
    assert long["bits_per_byte"] == pytest.approx(-long["logprob_sum"] / len(text.encode()) / np.log(2))
    assert short["num_continuation_tokens"] == len(short["token_logprobs"]) >= 1
    assert empty["error"] == {"code": "prompt_missing", "message": "the text has no tokens"}
    nats = -(long["logprob_sum"] + short["logprob_sum"])
    tokens, size = (long[n] + short[n] for n in ("num_continuation_tokens", "num_continuation_bytes"))
    assert summary.totals["perplexity"] == pytest.approx(np.exp(nats / tokens))
    assert summary.totals["bits_per_byte"] == pytest.approx(nats / size / np.log(2))


def harness_windows(tokens: list[int], prefix: int, max_length: int, context: int) -> Any:
    """lm-evaluation-harness's get_rolling_token_windows and make_disjoint_window, after their description."""
    first = min(max_length, len(tokens))
    pairs = [([prefix, *tokens[: first - 1]], tokens[:first])]
    done = first
    while done < len(tokens):
        end = done + min(len(tokens) - done, max_length - context + 1)
        pairs.append((tokens[end - max_length - 1 : end - 1], tokens[done:end]))
        done = end
    return [(a[: len(a) - (len(b) - 1)], b) for a, b in pairs]


# The jobs to start from


@pytest.mark.parametrize(("name", "rows"), [("classify", 8), ("score", 8)])
def test_the_jobs_to_start_from_run(tmp_path: Path, model_path: Path, name: str, rows: int) -> None:
    overrides = [f"model.source={model_path}", f"output.path={tmp_path / name}", f"input.limit={rows}"]
    spec = load_spec(ROOT / "jobs" / f"{name}.yaml", overrides)
    summary = run_job(spec, fresh=False, progress=SilentProgress(), stop=lambda: False)
    assert (summary.rows, summary.failed_rows) == (rows, 0) and summary.totals["scored_tokens"] > 0
    check_plan(spec)
