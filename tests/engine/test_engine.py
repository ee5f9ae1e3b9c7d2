"""When an answer ends, with what text, and what becomes of requests that cannot be answered."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from batchgen.engine.requests import RowWish
from batchgen.engine.types import Request, RequestOutput, Sample, SamplingParams
from tests.engine.mock import ByteDetokenizer, Draw, HashModel, Rig, letters, requests_for, scripted

EOS = 0
PIECES = ["</s>", "a", "b", "c", "ab", "bc", " ", "\n", "The end", ".", "\n\n", "é"]
PROMPT = (3, 3)


def detokenizer(extra: Sequence[bytes] = ()) -> ByteDetokenizer:
    """The end token adds nothing to a text; tokens from `len(PIECES)` on are `extra`."""
    return ByteDetokenizer([b"", *(piece.encode() for piece in PIECES[1:]), *extra], eos=[EOS])


def request(prompt: Sequence[int], *params: SamplingParams) -> Request:
    """One sample of row 0 for each of `params`."""
    samples = tuple(Sample(p, ((0, k),), k) for k, p in enumerate(params))
    return Request(np.array(prompt, np.int32), samples)


def answer(tokens: Sequence[int | str], extra: Sequence[bytes] = (), **params: Any) -> RequestOutput:
    """The answer of a model that would go on like this; a text stands for its token."""
    ids = [PIECES.index(token) if isinstance(token, str) else token for token in tokens]
    rig = Rig(scripted({PROMPT: ids}), detokenizer(extra))
    outputs = rig.run([request(PROMPT, SamplingParams(**{"max_tokens": len(ids), **params}))])
    return outputs[0, 0]


def ending(output: RequestOutput) -> tuple[str, str | None, str | None, int]:
    return output.finish_reason, output.stop_reason, output.text, len(output.token_ids)


# Length and the end token


def test_an_answer_ends_at_max_tokens() -> None:
    assert ending(answer(["a", "b", "c"], max_tokens=2)) == ("length", None, "ab", 2)


def test_an_answer_ends_at_the_end_token_which_is_no_text() -> None:
    output = answer(["a", "b", "</s>", "c"])
    assert ending(output) == ("stop", None, "ab", 3)
    assert output.token_ids.tolist() == [1, 2, EOS]


def test_the_end_token_as_the_last_allowed_one_is_a_stop() -> None:
    assert ending(answer(["a", "</s>"], max_tokens=2)) == ("stop", None, "a", 2)


def test_the_end_token_alone_is_an_empty_answer() -> None:
    assert ending(answer(["</s>"], max_tokens=5)) == ("stop", None, "", 1)


def test_ignore_eos_goes_on() -> None:
    assert ending(answer(["a", "</s>", "b"], ignore_eos=True)) == ("length", None, "ab", 3)


def test_ignore_eos_with_the_end_token_last_is_a_length() -> None:
    assert ending(answer(["a", "</s>"], ignore_eos=True)) == ("length", None, "a", 2)


def test_every_end_token_of_the_model_ends() -> None:
    rig = Rig(scripted({PROMPT: [1, 5]}), ByteDetokenizer([b"", b"a", b"", b"", b"", b"<end>"], eos=[0, 5]))
    output = rig.run([request(PROMPT, SamplingParams(max_tokens=9))])[0, 0]
    assert ending(output) == ("stop", None, "a", 2)


def test_min_tokens_forbids_the_end_token_until_then() -> None:
    """The model wants nothing but to end."""

    def model(draw: Draw) -> tuple[int, float]:
        return next(token for token in (EOS, 1) if token not in draw.suppress), -1.0

    rig = Rig(model, detokenizer())
    output = rig.run([request(PROMPT, SamplingParams(max_tokens=9, min_tokens=3))])[0, 0]
    assert output.token_ids.tolist() == [1, 1, 1, EOS]


def test_a_full_context_ends_the_answer() -> None:
    rig = Rig(scripted({PROMPT: [1] * 9}), detokenizer(), context_length=4)
    output = rig.run([request(PROMPT, SamplingParams(max_tokens=9))])[0, 0]
    assert ending(output) == ("length", None, "aaa", 3)


def test_max_tokens_zero_is_answered_without_a_forward() -> None:
    rig = Rig(scripted({}), detokenizer())
    rig.submit([request(PROMPT, SamplingParams(max_tokens=0))])
    assert rig.engine.has_work
    outputs, record = rig.engine.step()
    assert record is None and rig.backend.batches == [] and not rig.engine.has_work
    assert [ending(output) for output in outputs] == [("length", None, "", 0)]
    assert outputs[0].num_prompt_tokens == 2 and outputs[0].cumulative_logprob == 0.0


def test_a_step_without_work_does_nothing() -> None:
    rig = Rig(scripted({}), detokenizer())
    assert not rig.engine.has_work
    assert rig.engine.step() == ([], None)


# Stop strings


def test_stop_string_within_a_token() -> None:
    assert ending(answer(["a", "The end", "b"], stop=("e e",))) == ("stop", "e e", "aTh", 2)


def test_stop_string_over_several_tokens() -> None:
    output = answer(["a", "b", "c", "a", "b"], stop=("bca",))
    assert ending(output) == ("stop", "bca", "a", 4)
    assert output.token_ids.tolist() == [1, 2, 3, 1]


def test_stop_string_as_the_whole_answer() -> None:
    assert ending(answer(["\n", "\n"], stop=("\n\n",))) == ("stop", "\n\n", "", 2)


def test_stop_string_that_only_seems_to_begin() -> None:
    assert ending(answer(["a", "b", "a", "b", "c", "."], stop=("abc",))) == ("stop", "abc", "ab", 5)


def test_stop_string_that_is_never_there() -> None:
    assert ending(answer(["a", "b", "a"], stop=("bb", "aba."))) == ("length", None, "aba", 3)


def test_stop_string_of_the_prompt_does_not_count() -> None:
    assert ending(answer(["c", "a"], stop=("ccc",))) == ("length", None, "ca", 2)


def test_the_earliest_stop_string_wins_whatever_their_order() -> None:
    for stop in (("nd", "he"), ("he", "nd")):
        assert ending(answer(["The end"], stop=stop)) == ("stop", "he", "T", 1)


def test_the_longest_stop_string_at_a_place_wins() -> None:
    for stop in (("The", "The end", "Th"), ("The end", "Th", "The")):
        assert ending(answer(["a", "The end"], stop=stop)) == ("stop", "The end", "a", 2)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    """`abc` begins earlier, but is not there yet when `b` is."""
    assert ending(answer(["a", "b", "c"], stop=("abc", "b"))) == ("stop", "b", "a", 2)


def test_the_end_token_wins_over_a_later_stop_string() -> None:
    assert ending(answer(["a", "</s>", "b"], stop=("b",))) == ("stop", None, "a", 2)


def test_a_stop_string_at_the_last_allowed_token_is_a_stop() -> None:
    assert ending(answer(["a", "b"], max_tokens=2, stop=("b",))) == ("stop", "b", "a", 2)


def test_a_stop_string_is_not_found_across_an_ignored_end_token_unless_the_text_has_it() -> None:
    assert ending(answer(["a", "</s>", "b"], stop=("ab",), ignore_eos=True)) == ("stop", "ab", "", 3)


def test_min_tokens_delays_a_stop_string() -> None:
    """One that is complete before is part of the answer."""
    assert ending(answer(["a", "b", "a", "b"], stop=("b",), min_tokens=3)) == ("stop", "b", "aba", 4)
    assert ending(answer(["a", "b", "a", "c"], stop=("b",), min_tokens=3)) == ("length", None, "abac", 4)


def test_a_stop_string_that_ends_after_min_tokens_counts() -> None:
    assert ending(answer(["a", "b", "c", "a"], stop=("abc",), min_tokens=3)) == ("stop", "abc", "", 3)
    assert ending(answer(["a", "b", "c", "a"], stop=("ab",), min_tokens=3)) == ("length", None, "abca", 4)


def test_samples_of_a_prompt_watch_for_their_own_stop_strings() -> None:
    rig = Rig(scripted({PROMPT: [1, 2, 3, 1, 2, 3]}), detokenizer())
    stops: list[tuple[str, ...]] = [("ca",), (), ("b",), ("cab",)]
    outputs = rig.run([request(PROMPT, *(SamplingParams(max_tokens=6, stop=stop) for stop in stops))])
    assert [outputs[0, k].text for k in range(4)] == ["ab", "abcabc", "a", "ab"]
    assert [outputs[0, k].stop_reason for k in range(4)] == ["ca", None, "b", "cab"]


def test_a_stop_string_survives_being_set_back() -> None:
    """Row 1 is set back between the first and the last token of its stop string."""
    first, second = (1,) * 60, (2,) * 28
    texts = {}
    for length in range(4, 8):
        model = scripted({first: [1] * 40, second: [1] * length + [2, 3, 3]})
        rig = Rig(model, detokenizer(), num_pages=5, rash=True)
        wish = RowWish(SamplingParams(max_tokens=40, stop=("bc",)), 1, False)
        texts[length] = rig.run(requests_for([first, second], wish))[1, 0].text
        assert rig.engine.scheduler.preemptions == 1
    assert texts == {length: "a" * length for length in range(4, 8)}


# Characters of several bytes

EURO = [b"\xe2", b"\x82", b"\xac"]
E2, X82, AC = (len(PIECES) + i for i in range(3))


def test_stop_character_over_several_tokens() -> None:
    assert ending(answer(["a", E2, X82, AC, "b"], EURO, stop=("€",))) == ("stop", "€", "a", 4)


def test_text_before_a_stop_string_has_whole_characters() -> None:
    assert ending(answer([E2, X82, AC, ".", "a"], EURO, stop=(".",))) == ("stop", ".", "€", 4)


def test_stop_string_of_whole_characters_cut_from_a_token_with_half_of_the_next() -> None:
    """The last token ends the stop string and begins a character that never comes: it is cut with the rest."""
    assert ending(answer(["a", len(PIECES)], [b".\xe2"], stop=(".",))) == ("stop", ".", "a", 2)


def test_an_answer_that_ends_within_a_character_is_what_its_tokens_decode_to() -> None:
    output = answer(["a", E2, X82], EURO)
    assert ending(output) == ("length", None, "a\ufffd", 3)
    with_stop = answer(["a", E2, X82], EURO, stop=("never",))
    assert with_stop.text == output.text


def test_the_end_token_within_a_character() -> None:
    for stop in ((), ("never",)):
        assert ending(answer(["a", E2, "</s>"], EURO, stop=stop)) == ("stop", None, "a\ufffd", 3)


def test_a_stop_string_after_a_broken_character() -> None:
    assert ending(answer(["a", E2, "The end"], EURO, stop=("The",))) == ("stop", "The", "a\ufffd", 3)


def test_half_of_a_stop_character_is_no_stop() -> None:
    assert ending(answer([E2, X82, "a"], EURO, stop=("€",))) == ("length", None, "\ufffda", 3)


# What cannot be answered


def test_logits_that_are_not_numbers_fail_that_row_alone() -> None:
    sick = (7, 7, 7)
    healthy = HashModel(64)

    def model(draw: Draw) -> tuple[int, float]:
        is_sick = draw.context[:3] == sick and draw.context[3:4] != (5,) and len(draw.context) == 5
        return (0, float("nan")) if is_sick else (1 + healthy(draw)[0] % 60, -2.0)

    wish = RowWish(SamplingParams(max_tokens=5), 1, False)
    prompts = [sick, (7, 7), (7, 7, 8), (7, 7, 7, 5)]
    rig = Rig(model, letters(64))
    outputs = rig.run(requests_for(prompts, wish))
    bad = outputs[0, 0]
    assert (bad.finish_reason, bad.text, bad.num_prompt_tokens) == ("error", None, 3)
    assert bad.error is not None and bad.error.code == "internal_error"
    assert bad.error.message == "the model's logits are not finite at generated token 2"
    alone = Rig(model, letters(64)).run(requests_for(prompts[1:], wish))
    assert [ending(outputs[row + 1, 0]) for row in range(3)] == [ending(alone[row, 0]) for row in range(3)]
    assert all(outputs[row, 0].finish_reason == "length" for row in (1, 2, 3))


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), float("inf")])
def test_a_failed_first_token_fails_every_sample(logprob: float) -> None:
    rig = Rig(scripted({PROMPT: [1, 1]}, logprob), detokenizer())
    outputs = rig.run([request(PROMPT, SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, seed=1))])
    assert [output.error.code for output in outputs.values() if output.error] == ["internal_error"] * 2


@pytest.mark.parametrize(
    ("prompt", "code"),
    [([], "prompt_missing"), ([1, 64], "encode_error"), ([-1], "encode_error"), ([1] * 65, "prompt_too_long")],
)
def test_a_bad_prompt_is_an_answer_and_costs_no_step(prompt: list[int], code: str) -> None:
    rig = Rig(scripted({}), detokenizer(), context_length=64)
    params = SamplingParams(max_tokens=3)
    rig.submit([Request(np.array(prompt, np.int32), (Sample(params, ((4, 0), (9, 0))), Sample(params, ((4, 1),))))])
    outputs, record = rig.engine.step()
    assert record is None and not rig.engine.has_work
    assert [(output.row_index, output.sample_index) for output in outputs] == [(4, 0), (9, 0), (4, 1)]
    for output in outputs:
        assert output.error is not None
        assert (output.finish_reason, output.error.code, output.text) == ("error", code, None)
        assert output.num_prompt_tokens == len(prompt)


def test_bad_rows_leave_their_neighbours_alone() -> None:
    wishes = [RowWish(SamplingParams(max_tokens=count), 1, False) for count in (2, 2, 200, 0)]
    rig = Rig(scripted({PROMPT: [1, 2]}), detokenizer(), num_pages=2)
    outputs = rig.run(requests_for([[], PROMPT, (1,), (9,)], wishes))
    assert [outputs[row, 0].finish_reason for row in range(4)] == ["error", "length", "error", "length"]
    failure = outputs[2, 0].error
    assert failure is not None and failure.code == "resource_error"


def test_samples_that_need_too_much_memory_leave_the_others_of_their_prompt() -> None:
    rig = Rig(scripted({PROMPT: [1] * 70}), detokenizer(), num_pages=2)
    outputs = rig.run([request(PROMPT, *(SamplingParams(max_tokens=count) for count in (63, 64, 0, 1)))])
    assert [outputs[0, k].finish_reason for k in range(4)] == ["length", "error", "length", "length"]
    assert [len(outputs[0, k].token_ids) for k in range(4)] == [63, 0, 0, 1]


# What an answer carries


def test_targets_of_a_sample_get_the_same_answer() -> None:
    sample = Sample(SamplingParams(max_tokens=2), ((3, 0), (5, 0), (5, 1)))
    rig = Rig(scripted({PROMPT: [1, 2]}), detokenizer())
    outputs = rig.run([Request(np.array(PROMPT, np.int32), (sample,))])
    assert sorted(outputs) == [(3, 0), (5, 0), (5, 1)]
    assert {output.text for output in outputs.values()} == {"ab"}
    assert len(rig.records) == 2


def test_steps_times_and_logprobs_of_every_token() -> None:
    rig = Rig(scripted({PROMPT: [1, 2, 3]}, logprob=-0.5), detokenizer(), max_batch_tokens=1)
    output = rig.run([request(PROMPT, SamplingParams(max_tokens=3))])[0, 0]
    assert output.token_steps.tolist() == [1, 2, 3]  # the prompt takes steps 0 and 1
    assert output.logprobs.tolist() == [-0.5] * 3 and output.cumulative_logprob == -1.5
    assert [a.dtype for a in (output.token_ids, output.logprobs, output.token_steps, output.token_times)] == [
        np.int32,
        np.float32,
        np.int32,
        np.int64,
    ]
    ends = [record.start_ns + record.schedule_ns + record.forward_ns for record in rig.records]
    assert output.token_times.tolist() == ends[1:]
    assert output.arrived_ns < output.scheduled_ns == rig.records[0].start_ns
    assert (output.first_token_ns, output.finished_ns) == (ends[1], ends[3])


def test_prompt_and_generated_tokens_of_a_step_are_counted_apart() -> None:
    rig = Rig(HashModel(20), letters(20), max_batch_tokens=6)
    wish = RowWish(SamplingParams(max_tokens=3, ignore_eos=True), 1, False)
    rig.run(requests_for([[1] * 4, [2] * 7], wish))
    assert [(r.num_prefill_tokens, r.num_decode_tokens, r.num_seqs) for r in rig.records] == [
        (6, 0, 2),
        (5, 1, 2),
        (0, 2, 2),
        (0, 1, 1),
    ]
    assert rig.engine.scheduler.generated_tokens == 6


def test_the_engine_takes_requests_while_it_runs() -> None:
    rig = Rig(scripted({PROMPT: [1, 2, 3], (4,): [2, 2]}), detokenizer())
    rig.submit([request(PROMPT, SamplingParams(max_tokens=3))])
    rig.step()
    second = Request(np.array([4], np.int32), (Sample(SamplingParams(max_tokens=2), ((1, 0),)),))
    outputs = rig.run([second])
    assert {key: output.text for key, output in outputs.items()} == {(0, 0): "abc", (1, 0): "bb"}
    assert [record.num_seqs for record in rig.records] == [1, 2, 2]
