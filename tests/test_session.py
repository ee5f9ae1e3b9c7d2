"""Lists of requests in memory: the same bits as jobs, whatever else is asked in a call."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from batchgen.engine.types import SamplingParams
from batchgen.errors import SpecError
from batchgen.session import Session
from batchgen.spec import CacheSpec, EngineSpec, ModelSpec
from tests.conftest import ROOT

PROMPTS = pl.read_parquet(ROOT / "jobs" / "data" / "humaneval.parquet")[:6]
TEXTS, SOLUTIONS = PROMPTS["prompt"].to_list(), PROMPTS["canonical_solution"].to_list()
SHORT = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def session(model_path: Path) -> Iterator[Session]:
    with Session.open(ModelSpec(source=str(model_path))) as session:
        yield session


@pytest.fixture
def job_results(make_spec, run, tmp_path: Path) -> Any:
    def results(task: dict[str, Any], sampling: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        PROMPTS.write_parquet(tmp_path / "rows.parquet")
        given = {"path": str(tmp_path / "rows.parquet"), "prompt": "{{ prompt }}", "chat": False, "parse_special": True}
        spec = make_spec(input=given, task=task, **({"sampling": sampling} if sampling else {}))
        run(spec)
        return pl.read_parquet(Path(spec.output.path) / "results" / "*.parquet").rows(named=True)

    return results


def test_answers_are_those_of_a_job(session: Session, job_results) -> None:
    rows = job_results({"kind": "generate"}, {"max_tokens": 8})
    answers = session.generate(TEXTS, SHORT)
    assert [answer.row_index for answer in answers] == list(range(6))
    for answer, row in zip(answers, rows, strict=True):
        assert (answer.text, answer.token_ids.tolist()) == (row["text"], row["token_ids"])
        assert answer.cumulative_logprob == row["cumulative_logprob"]
    [alone] = session.generate([session.encode(TEXTS)[3]], SHORT)
    assert alone.logprobs.tobytes() == answers[3].logprobs.tobytes()


def test_scores_are_those_of_a_job(session: Session, job_results) -> None:
    rows = job_results({"kind": "score", "continuation": "{{ canonical_solution }}"})
    scores = session.score(TEXTS, SOLUTIONS)
    for score, row in zip(scores, rows, strict=True):
        assert (score.token_ids.tolist(), score.is_greedy) == (row["token_ids"], row["is_greedy"])
        assert (score.logprobs.tolist(), score.logprob) == (row["token_logprobs"], row["logprob_sum"])
    encoded = session.encode([TEXTS[2].rstrip()])
    [by_ids] = session.score(encoded, [scores[2].token_ids])
    assert by_ids.logprobs.tobytes() == scores[2].logprobs.tobytes()


@pytest.mark.parametrize("max_length", [None, 64])
def test_rolling_scores_are_those_of_a_job(session: Session, job_results, max_length: int | None) -> None:
    rows = job_results({"kind": "perplexity"} | ({"max_length": max_length} if max_length else {}))
    for score, row in zip(session.rolling(TEXTS, max_length), rows, strict=True):
        assert (score.logprobs.tolist(), score.logprob) == (row["token_logprobs"], row["logprob_sum"])
        assert score.token_ids.tolist() == row["token_ids"] == session.encode([row["prompt"]])[0].tolist()


def test_what_requests_share_is_computed_once(session: Session) -> None:
    header = "\n".join(TEXTS)
    contexts = [f"{header}\nQuestion {i}:" for i in range(4) for _ in range(2)]
    scores = session.score(contexts, [" yes", " no"] * 4)
    computed = sum(score.num_prompt_tokens - score.num_cached_tokens for score in scores)
    size = len(session.encode([contexts[0]])[0])
    assert size < computed < size + 20 and sum(score.num_prompt_tokens for score in scores) == 8 * size
    again = session.score(contexts[-1:], [" no"])
    assert again[0].logprobs.tobytes() == scores[-1].logprobs.tobytes()


def test_every_prompt_may_have_parameters_of_its_own_and_equal_ones_draw_apart(session: Session) -> None:
    drawn = SamplingParams(max_tokens=8, temperature=1.5)
    answers = session.generate([TEXTS[0]] * 4, [SHORT, drawn, drawn, SamplingParams(max_tokens=2)])
    assert [len(answer.token_ids) for answer in answers] == [8, 8, 8, 2]
    assert answers[0].token_ids[:2].tolist() == answers[3].token_ids.tolist()
    assert len({answer.text for answer in answers[:3]}) == 3
    [first, second] = session.generate([TEXTS[0]] * 2, drawn)
    assert (first.text, second.text) == (answers[1].text, answers[2].text)


def test_what_cannot_be_answered_has_an_error(session: Session) -> None:
    length = session.context_length
    prompts = ["", "\ud800", "fine", np.full(length + 1, 5, np.int32), [session.model.tokenizer.vocab_size]]
    answers = session.generate(prompts, SamplingParams(max_tokens=1))
    codes = ["prompt_missing", "encode_error", None, "prompt_too_long", "encode_error"]
    assert [answer.error and answer.error.code for answer in answers] == codes
    assert [answer.row_index for answer in answers] == list(range(5)) and answers[2].text
    scores = session.score(["a", "a", "a", "\ud800"], [" b", "", " c" * 9, "b"], max_length=8)
    assert [score.error and score.error.code for score in scores] == [
        None,
        "encode_error",
        "prompt_too_long",
        "encode_error",
    ]
    assert scores[0].logprob < 0 and len(scores[1].token_ids) == 0
    assert [score.error and score.error.code for score in session.rolling(["a", ""])] == [None, "prompt_missing"]
    with pytest.raises(TypeError, match="token ids"):
        session.score([[5]], ["text"])


def test_nothing_is_asked(session: Session) -> None:
    assert session.generate([], SHORT) == session.score([], []) == session.rolling([]) == []


def test_progress_counts_up(session: Session) -> None:
    done: list[int] = []
    session.generate(TEXTS, [SamplingParams(max_tokens=n) for n in range(1, 7)], done.append)
    assert done == sorted(done) and done[-1] == 6 and len(done) > 3


def test_a_cache_for_later_jobs_is_refused(model_path: Path, tmp_path: Path) -> None:
    engine = EngineSpec(cache=CacheSpec(disk_path=str(tmp_path)))
    with pytest.raises(SpecError, match=r"engine\.cache"):
        Session.open(ModelSpec(source=str(model_path)), engine)
