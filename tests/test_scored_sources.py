"""From rows to what is scored: borders, empty texts, long ones, and why rows fail."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from batchgen.engine.planner import Admission
from batchgen.engine.prompt_table import MemoryStore
from batchgen.io.table import open_table
from batchgen.prompts import JobPrompts, PromptReader
from batchgen.scored_sources import Bounds, rolling_windows, split_spaces
from batchgen.spec import JobSpec
from batchgen.text.chat_template import ChatTemplate
from tests.test_prompts import Characters

ADMISSION = Admission(context_length=12, vocab_size=1000, kv_tokens=100)
CHAT = ChatTemplate("{% for m in messages %}<{{ m.content }}>{% endfor %}", None, None)
BOS, EOS = ord("^"), ord("$")


class Letters(Characters):
    """Tokens are code points; with `add_bos` BOS is put before a text."""

    bos_token_id: int | None
    eos_token_id = EOS

    def __init__(self, add_bos: bool = False, bos: int | None = BOS):
        super().__init__()
        self.add_bos, self.bos_token_id = add_bos, bos  # type: ignore[misc]

    def encode_batch(self, texts: Any, *, parse_special: bool = True) -> list[NDArray[np.int32]]:
        found = super().encode_batch(texts, parse_special=parse_special)
        return [np.concatenate([[BOS], ids]).astype(np.int32) for ids in found] if self.add_bos else found

    encode_rendered_batch = encode_batch

    def protect(self, value: Any) -> Any:
        return value.replace("<", "(") if isinstance(value, str) else [{**m, "role": m["role"]} for m in value]


def read(
    folder: Path, rows: list[dict[str, Any]], task: dict[str, Any], tokenizer: Letters | None = None, **given: Any
) -> JobPrompts:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    source = {"path": str(folder / "rows.parquet"), "prompt": "{{ q }}", "chat": False} | given
    spec = JobSpec.model_validate({"model": {"source": "none"}, "input": source, "task": task})
    table = open_table(spec.input.path)
    reader = PromptReader(spec, tokenizer or Letters(), CHAT, ADMISSION.context_length)  # type: ignore[arg-type]
    reader.check(table)
    return reader.read(table, ADMISSION, MemoryStore())


def found(prompts: JobPrompts) -> list[tuple[int, int, str, str]]:
    """(row, number, context, continuation) of each thing to score."""
    result = []
    for place, row in enumerate(prompts.table.row_index.tolist()):
        wish = prompts.wishes[place]
        assert wish.score is not None
        text = "".join(map(chr, [*prompts.table.prompt(place), wish.score.last_token]))
        result.append((row, wish.sample_index, text[: -wish.score.count], text[-wish.score.count :]))
    return result


def failed(prompts: JobPrompts) -> dict[int, tuple[str, str]]:
    return {row.row_index: (row.failure.code, row.failure.message) for row in prompts.failures}


SCORE = {"kind": "score", "continuation": "{{ c }}"}


@pytest.mark.parametrize(
    ("context", "continuation", "expected"),
    [
        ("ab", "cd", ("ab", "cd")),
        ("ab \n", "cd", ("ab", " \ncd")),  # white space moves
        ("", "cd", ("^", "cd")),  # BOS stands for no context
        ("  ", "c", ("^", "  c")),
        ("", "^cd", ("^", "cd")),  # unless it is there
        ("abcdefghijkl", "mn", ("bcdefghijkl", "mn")),  # 12 tokens are seen; the last is not among them
        ("abc", "defghijklmno", ("c", "defghijklmno")),
        ("a" * 30, " ", ("a" * 12, " ")),
    ],
)
def test_borders(tmp_path: Path, context: str, continuation: str, expected: tuple[str, str]) -> None:
    prompts = read(tmp_path, [{"q": context, "c": continuation}], SCORE)
    assert found(prompts) == [(0, 0, *expected)]
    assert prompts.truncated.tolist() == [max(0, len(context + continuation) - 13)]


def test_a_tokenizer_that_puts_bos_before_a_text(tmp_path: Path) -> None:
    rows = [{"q": "ab", "c": "cd"}, {"q": "", "c": "cd"}]
    assert found(read(tmp_path, rows, SCORE, Letters(add_bos=True))) == [(0, 0, "^ab", "cd"), (1, 0, "^", "cd")]


def test_eos_stands_for_no_context_where_there_is_no_bos(tmp_path: Path) -> None:
    assert found(read(tmp_path, [{"q": "", "c": "cd"}], SCORE, Letters(bos=None))) == [(0, 0, "$", "cd")]


def test_after_a_chat_template_and_what_is_text_there_stays_text(tmp_path: Path) -> None:
    prompts = read(tmp_path, [{"q": "ab", "c": "c<d"}], SCORE, chat=True)
    assert found(prompts) == [(0, 0, "<ab>", "c(d")]


FAILURES: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"q": "a", "c": ""}, ("prompt_missing", "task.continuation is empty: there is nothing to score")),
    ({"q": "", "c": "^"}, ("prompt_missing", "there is nothing to score but the token that texts begin with")),
    (
        {"q": "a", "c": "b" * 13},
        ("prompt_too_long", "the continuation has 13 tokens; 12 can be seen at a time"),
    ),
    (
        {"q": "a", "c": None},
        ("prompt_missing", 'task.continuation: c is null (write {{ c or "…" }} to put something else there)'),
    ),
    (
        {"q": None, "c": "b"},
        ("prompt_missing", 'input.prompt: q is null (write {{ q or "…" }} to put something else there)'),
    ),
    ({"q": "a", "c": "\u2603"}, ("encode_error", "the continuation has a token id outside 0..999")),
]


@pytest.mark.parametrize(("row", "expected"), FAILURES)
def test_rows_that_fail_leave_others_alone(tmp_path: Path, row: dict[str, Any], expected: tuple[str, str]) -> None:
    prompts = read(tmp_path, [{"q": "x", "c": "y"}, row, {"q": "v", "c": "w"}], SCORE)
    assert failed(prompts) == {1: expected}
    assert found(prompts) == [(0, 0, "x", "y"), (2, 0, "v", "w")]
    assert prompts.samples.tolist() == [1, 1, 1]


def test_choices_of_a_row_are_its_results_by_number(tmp_path: Path) -> None:
    rows = [{"q": "a ", "c": ["b", "bc"]}, {"q": "d", "c": []}, {"q": "e", "c": ["f", None]}, {"q": "g", "c": ["h"]}]
    task = {"kind": "choose", "choices": "c", "delimiter": "-"}
    prompts = read(tmp_path, rows, task)
    assert found(prompts) == [(0, 0, "a", " -b"), (0, 1, "a", " -bc"), (3, 0, "g", "-h")]
    assert prompts.samples.tolist() == [2, 1, 1, 1]
    assert failed(prompts) == {
        1: ("prompt_missing", "column 'c' has no choices"),
        2: ("schema_error", "column 'c' does not hold a list of texts"),
    }


def test_a_row_fails_as_a_whole(tmp_path: Path) -> None:
    prompts = read(tmp_path, [{"q": "a", "c": ["b", "c" * 13, "d"]}], {"kind": "choose", "choices": "c"})
    assert found(prompts) == [] and prompts.samples.tolist() == [1] and len(prompts.failures) == 1


def test_token_ids_are_used_as_they_are(tmp_path: Path) -> None:
    rows = [{"q": [65, 32], "c": [66, 67]}, {"q": [65], "c": []}, {"q": [], "c": [66]}, {"q": [65], "c": [-1]}]
    prompts = read(tmp_path, rows, SCORE, prompt=None, chat="auto", token_ids="q")
    assert found(prompts) == [(0, 0, "A ", "BC"), (2, 0, "^", "B")]
    assert {row: code for row, (code, _) in failed(prompts).items()} == {1: "prompt_missing", 3: "encode_error"}


def test_texts_after_token_ids_are_refused(tmp_path: Path) -> None:
    prompts = read(tmp_path, [{"q": [65], "c": "b"}], SCORE, prompt=None, chat="auto", token_ids="q")
    message = "after input.token_ids, task.continuation must be a column of token ids"
    assert failed(prompts) == {0: ("schema_error", message)}


def test_windows_of_a_text_after_the_harness_example() -> None:
    """lm-evaluation-harness, `LM.loglikelihood_rolling`: ten tokens, four seen at a time."""
    windows = list(rolling_windows(np.arange(10, dtype=np.int32), 4, Bounds(4, prefix=99)))
    assert [(w.prompt.tolist(), w.count, w.last) for w in windows] == [
        ([99, 0, 1, 2], 4, 3),
        ([3, 4, 5, 6], 4, 7),
        ([5, 6, 7, 8], 2, 9),
    ]


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_text_is_predicted_from_the_token_that_texts_begin_with(tmp_path: Path, add_bos: bool) -> None:
    task = {"kind": "perplexity", "max_length": 4, "stride": 2}
    prompts = read(tmp_path, [{"q": "abcdefg"}, {"q": ""}], task, Letters(add_bos))
    assert found(prompts) == [(0, 0, "^", "abcd"), (0, 1, "cde"[:0] + "bcd", "ef"), (0, 2, "cdef", "g")]
    assert failed(prompts) == {1: ("prompt_missing", "the text has no tokens")}
    assert prompts.samples.tolist() == [3, 1]


def test_only_white_space_at_the_end_moves() -> None:
    assert split_spaces(" a b \u3000\n", "c") == (" a b", " \u3000\nc")
