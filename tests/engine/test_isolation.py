"""What goes wrong with one row stays with it: the others get the same answers, bit by bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.cache_tiers import HostMemory
from batchgen.engine.isolation import MOST_FAULTS
from batchgen.engine.requests import RowWish
from batchgen.engine.types import RequestOutput, RowFailure, SamplingParams
from batchgen.errors import ModelError, OutputError, RowError
from tests.engine.mock import ByteDetokenizer, Draw, HashModel, Rig, letters, requests_for

VOCAB = 20
EVIL = (1, 2, 3, 4)  # this row's prompt
PROMPTS = [(1, 2, 3), EVIL, (1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (7, 7), (1,)]
Break = Callable[[Rig], None]


def is_evil(tokens: Any) -> bool:
    """Whether these tokens of a sequence are the evil row's, and not those of a row that begins like it."""
    tokens = tuple(int(token) for token in tokens)
    return tokens[:4] == EVIL and tokens[4:5] != (5,)


def breaking_model(generated: int) -> Break:
    """The backend fails when the evil row has so many tokens."""

    def apply(rig: Rig) -> None:
        model = rig.backend.model

        def broken(draw: Draw) -> tuple[int, float]:
            if is_evil(draw.context) and len(draw.context) == len(EVIL) + generated:
                raise ValueError("cannot\ncompute")
            return model(draw)

        rig.backend.model = broken

    return apply


def breaking_sampler(rig: Rig) -> None:
    sampler = rig.engine._runner._sampler
    prepare = sampler.prepare

    def broken(plan: Any) -> Any:
        if any(is_evil(part.sequence.token_ids[: part.sequence.num_tokens]) for part in plan.scheduled):
            raise ValueError("cannot compute")
        return prepare(plan)

    sampler.prepare = broken  # type: ignore[method-assign]


def breaking_text(rig: Rig) -> None:
    """The text of the evil row's whole answer cannot be decoded."""
    text = rig.engine._text

    def broken(sequence: Any, *arguments: Any) -> str:
        if is_evil(sequence.token_ids[: sequence.num_tokens]):
            raise ValueError("cannot compute")
        return text(sequence, *arguments)

    rig.engine._text = broken  # type: ignore[method-assign]


def breaking_watch(rig: Rig) -> None:
    """A stop string's watcher fails at the evil row's second token."""
    watch = rig.engine._watch

    def broken(sequence: Any, token: int) -> str | None:
        if is_evil(sequence.token_ids[: sequence.num_tokens]) and sequence.num_generated == 2:
            raise ValueError("cannot compute")
        return watch(sequence, token)

    rig.engine._watch = broken  # type: ignore[method-assign]


FAULTS: dict[str, tuple[Break, int]] = {  # and the tokens that the evil row has got by then
    "backend, prompt": (breaking_model(0), 0),
    "backend, first token": (breaking_model(1), 1),
    "backend, later": (breaking_model(3), 3),
    "sampler": (breaking_sampler, 0),
    "text": (breaking_text, 4),
    "stop strings": (breaking_watch, 2),
}
RIGS: dict[str, dict[str, Any]] = {
    "together": {},
    "small chunks": {"max_batch_tokens": 3},
    "two at a time": {"max_num_seqs": 2},
    "no sharing": {"prefix_sharing": False},
    "prompts first": {"prefill_first": True},
}


def answers(outputs: dict[tuple[int, int], RequestOutput]) -> dict[tuple[int, int], tuple[Any, ...]]:
    return {
        key: (o.finish_reason, o.text, o.token_ids.tolist(), o.logprobs.tobytes(), o.error)
        for key, o in outputs.items()
    }


@pytest.mark.parametrize("options", RIGS.values(), ids=RIGS)
@pytest.mark.parametrize(("fault", "tokens"), FAULTS.values(), ids=FAULTS)
def test_a_fault_stays_with_its_row(fault: Break, tokens: int, options: dict[str, Any]) -> None:
    wish = RowWish(SamplingParams(max_tokens=4, ignore_eos=True, stop=("zzz",)), 2, False)
    requests = requests_for(PROMPTS, wish, sharing=options.get("prefix_sharing", True))
    sound, broken = (Rig(HashModel(VOCAB), letters(VOCAB), **options) for _ in range(2))
    fault(broken)
    wanted, found = answers(sound.run(requests)), answers(broken.run(requests))
    assert wanted.keys() == found.keys()
    for key, answer in found.items():
        if key[0] != 1:
            assert answer == wanted[key], key
            continue
        reason, text, ids, _, error = answer
        assert (reason, text, len(ids), error.code) == ("error", None, tokens, "internal_error")
        assert ids == wanted[key][2][:tokens]
        assert error.message.startswith("ValueError: cannot compute; ")


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.data())
def test_whatever_fails_the_others_are_answered(data: st.DataObject) -> None:
    """Faults depend on all tokens so far. Shared pages, copies, chunks, samples, sequences set back: all is there."""
    prompts = data.draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=80), min_size=1, max_size=8))
    one_in, salt = data.draw(st.integers(3, 15)), data.draw(st.integers(0, 1000))
    max_tokens = data.draw(st.integers(1, 6))
    model = HashModel(VOCAB)

    def fails(context: tuple[int, ...]) -> bool:
        return hash((salt, *context)) % one_in == 0

    def broken(draw: Draw) -> tuple[int, float]:
        if fails(draw.context):
            raise ArithmeticError("bad luck")
        return model(draw)

    options: dict[str, Any] = {
        "max_batch_tokens": data.draw(st.sampled_from([5, 40, 256])),
        "max_num_seqs": data.draw(st.sampled_from([1, 3, 16])),
        "num_pages": data.draw(st.sampled_from([6, 64])),
        "prefill_first": data.draw(st.booleans()),
        "rash": data.draw(st.booleans()),
        "store": HostMemory(1 << 20) if data.draw(st.booleans()) else None,
    }
    n = data.draw(st.sampled_from([1, 2]))
    requests = requests_for(prompts, RowWish(SamplingParams(max_tokens=max_tokens, ignore_eos=True), n, False))
    for _ in range(2):  # the second finds what the first has saved
        outputs = Rig(broken, letters(VOCAB), **options).run(requests)
        assert len(outputs) == n * len(prompts)
        for (row, _), output in outputs.items():
            wanted, failed = [], False
            while len(wanted) < max_tokens and not failed:
                context = (*prompts[row], *wanted)
                failed = fails(context)
                wanted += [] if failed else [model(Draw(context))[0]]
            assert (output.token_ids.tolist(), output.finish_reason) == (wanted, "error" if failed else "length")


def test_a_chunk_of_a_prompt_that_fails_takes_nobody_along() -> None:
    """Token 13 cannot be computed; rows that share what comes before it in the same step are answered."""
    prompts = [[5] * 40 + rest for rest in ([13, 1], [13, 2], [1, 1], [2])] + [[6]]
    wish = RowWish(SamplingParams(max_tokens=3, ignore_eos=True), 1, False)
    sound = Rig(HashModel(VOCAB), letters(VOCAB)).run(requests_for(prompts, wish))
    for chunk in (7, 41, 256):
        rig = Rig(HashModel(VOCAB), letters(VOCAB), max_batch_tokens=chunk)
        run = rig.backend.run

        def broken(batch: Any, run: Any = run) -> Any:
            if (batch.input_ids == 13).any():
                raise ValueError("unlucky")
            return run(batch)

        rig.backend.run = broken  # type: ignore[method-assign]
        found = answers(rig.run(requests_for(prompts, wish)))
        assert [found[row, 0][0] for row in range(5)] == ["error", "error", "length", "length", "length"]
        assert [found[row, 0] for row in (2, 3, 4)] == [answers(sound)[row, 0] for row in (2, 3, 4)]


@pytest.mark.parametrize("error", [MemoryError("full"), KeyboardInterrupt(), OutputError("the disk is full")])
@pytest.mark.parametrize("where", ["backend", "text"])
def test_what_is_no_fault_of_a_row_stops_the_job(error: BaseException, where: str) -> None:
    def stop(*arguments: Any) -> Any:
        raise error

    detokenizer = letters(VOCAB) if where == "backend" else Undecodable(stop)
    rig = Rig(stop if where == "backend" else HashModel(VOCAB), detokenizer)
    with pytest.raises(type(error)):
        rig.run(requests_for([(1, 2), (3,)], RowWish(SamplingParams(max_tokens=1), 1, False)))


class Undecodable(ByteDetokenizer):
    def __init__(self, stop: Callable[..., Any]):
        super().__init__([b"a"] * VOCAB, eos=())
        self.decode = stop  # type: ignore[method-assign]


def test_an_error_that_says_what_is_wrong_with_the_row_keeps_its_code() -> None:
    def stop(*arguments: Any) -> Any:
        raise RowError("encode_error", "no such token")

    rig = Rig(HashModel(VOCAB), Undecodable(stop))
    output = rig.run(requests_for([(1, 2)], RowWish(SamplingParams(max_tokens=1), 1, False)))[0, 0]
    assert output.error == RowFailure("encode_error", "no such token")


def test_a_backend_that_computes_nothing_stops_the_job() -> None:
    def broken(draw: Draw) -> tuple[int, float]:
        raise RuntimeError("the device is gone")

    rig = Rig(broken, letters(VOCAB))
    wish = RowWish(SamplingParams(max_tokens=1), 1, False)
    few = np.arange(MOST_FAULTS).reshape(-1, 1) % VOCAB
    prompts = [(int(i), 1 + int(i) // VOCAB, number) for number, i in enumerate(few[:, 0])]
    assert {o.finish_reason for o in Rig(broken, letters(VOCAB)).run(requests_for(prompts, wish)).values()} == {"error"}
    with pytest.raises(ModelError, match=f"{MOST_FAULTS + 1} sequences in a row .*: RuntimeError: the device is gone"):
        rig.run(requests_for([*prompts, (1,)], wish))
