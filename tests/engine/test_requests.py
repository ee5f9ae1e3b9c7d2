"""Hashes of requests: equal for equal answers, wherever their rows stand."""

from dataclasses import replace

import pytest

from batchgen.engine.planner import plan_prefixes
from batchgen.engine.requests import RowWish, make_requests
from batchgen.engine.run_order import plan_order
from batchgen.engine.types import SamplingParams
from tests.engine.mock import prompt_table

GREEDY, SAMPLED = SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, temperature=0.5)


def hashes(
    prompts: list[list[int]], params: SamplingParams, n: int = 1, root: bytes = b"", sharing: bool = True
) -> dict[tuple[int, int], str]:
    """By row and sample."""
    table = prompt_table(prompts)
    plan = plan_prefixes(table)
    requests = make_requests(
        table, plan, plan_order(plan), lambda i: RowWish(params, n, False), sharing=sharing, root=root
    )
    return {target: s.request_hash for request in requests for s in request.samples for target in s.targets}


def test_a_hash_is_the_same_wherever_the_row_stands_and_however_it_is_run() -> None:
    first = hashes([[1, 2], [3], [1, 2, 3]], SAMPLED, n=2)
    assert len(set(first.values())) == 6 and all(len(text) == 32 for text in first.values())
    second = hashes([[9], [1, 2, 3], [3]], SAMPLED, n=2, sharing=False)
    assert [second[1, k] for k in (0, 1)] == [first[2, k] for k in (0, 1)]
    assert [second[2, k] for k in (0, 1)] == [first[1, k] for k in (0, 1)]


def test_equal_rows_have_equal_hashes_when_greedy_and_the_next_samples_when_not() -> None:
    assert len(set(hashes([[1], [1]], GREEDY, n=2).values())) == 1
    assert hashes([[1], [1]], SAMPLED) == {
        (0, 0): hashes([[1]], SAMPLED)[0, 0],
        (1, 0): hashes([[1]], SAMPLED, 2)[0, 1],
    }


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        ({"temperature": 0.6}, True),
        ({"max_tokens": 5}, True),
        ({"stop": ("x",)}, True),
        ({"seed": 1}, True),
        ({"temperature": 0.0}, True),
        ({"top_p": 1.0}, False),  # the default
    ],
)
def test_what_is_asked_matters(change: dict[str, object], matters: bool) -> None:
    assert (hashes([[1]], SAMPLED) != hashes([[1]], replace(SAMPLED, **change))) == matters  # type: ignore[arg-type]


def test_what_a_greedy_answer_does_not_look_at_does_not_matter() -> None:
    assert hashes([[1]], GREEDY) == hashes([[1]], replace(GREEDY, seed=3, top_p=0.5))


def test_the_model_matters() -> None:
    assert hashes([[1]], GREEDY, root=b"a") != hashes([[1]], GREEDY, root=b"b")
