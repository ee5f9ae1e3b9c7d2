"""The harness on a tiny model: its own rules for tokens, its tasks, its command line."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness (pip install 'batchgen[lm-eval]')")

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import get_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from batchgen import cli
from batchgen.engine.types import SamplingParams
from batchgen.errors import BatchgenError, RowError, SpecError
from batchgen.integrations.lm_eval import BatchgenLM
from batchgen.session import Session
from tests.gguf_bytes import tiny_gguf
from tests.integrations.harness import evaluate
from tests.integrations.tasks import SHOTS, write_tasks


def requests(*args: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each, task_name="task", doc_id=number) for number, each in enumerate(args)]


# The harness's rules


class HarnessRules(TemplateLM):
    """The harness's own way from texts to tokens, before scores that are asked for by token."""

    def __init__(self, session: Session, max_length: int):
        super().__init__()
        self.session, self.max_length = session, max_length

    @property
    def eot_token_id(self) -> int:
        return self.session.model.tokenizer.bos_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.session.encode([string])[0].tolist()

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        scores = self.session.score([r[1] for r in requests], [r[2] for r in requests], self.max_length)
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        found = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(score for score, _ in self._loglikelihood_tokens(pairs)))
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError


PAIRS = [
    ("hello", " world"),
    ("hello ", "world"),
    ("hello \n", "hello"),
    ("", "hello"),
    ("", "<s>hello"),  # begins with what stands for an empty context
    ("hel", "lo"),  # whose tokens go together
    ("<|im_start|>user\nhello<|im_end|>\n", "hello<|im_end|>"),
    ("x" * 40, " hello"),
    ("hello" * 40, "0123456789012345"),  # as long as may be
]


@pytest.mark.parametrize("max_length", [16, None])
def test_continuations_get_the_tokens_that_the_harness_gives_them(tiny_session, max_length: int | None) -> None:
    ours = BatchgenLM(tiny_session, max_length)
    pairs = PAIRS if max_length is None else [pair for pair in PAIRS if len(pair[1]) <= max_length]
    asked = [pair for pair in pairs if pair != ("hel", "lo")]
    theirs = HarnessRules(tiny_session, ours.max_length)
    found, expected = ours.loglikelihood(requests(*asked)), theirs.loglikelihood(requests(*asked))
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-6)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    with pytest.raises(BatchgenError, match=r"task task, document 0: encode_error: .*adds no token"):
        ours.loglikelihood(requests(("hel", "lo")))  # the harness asserts that there is a token


@pytest.mark.parametrize("max_length", [4, 16, None])
def test_texts_are_cut_into_the_windows_of_the_harness(tiny_session, max_length: int | None) -> None:
    texts = [("hello, world " * 3,), ("x",), ("",), ("hello",), ("0123456789abcdef",)]
    ours = BatchgenLM(tiny_session, max_length)
    expected = HarnessRules(tiny_session, ours.max_length).loglikelihood_rolling(requests(*texts))
    assert ours.loglikelihood_rolling(requests(*texts)) == pytest.approx(expected, rel=1e-6)


# Answers


def test_answers_end_before_what_stops_them(tiny_session) -> None:
    model = BatchgenLM(tiny_session, max_gen_toks=24)
    [[plain], [whole]] = [model.generate_until(requests(("hello", given))) for given in ({}, {"max_gen_toks": 4})]
    assert plain.startswith(whole) and len(plain) > len(whole) > 0
    stop = plain[3]
    given = {"until": [stop, ""], "do_sample": False, "temperature": 0.7, "num_beams": 1}
    assert model.generate_until(requests(("hello", given), ("hello", {"until": stop}))) == [plain.split(stop)[0]] * 2


def test_long_contexts_lose_their_beginning(tiny_session) -> None:
    model, given = BatchgenLM(tiny_session, max_length=16), {"max_gen_toks": 6}
    long = "abcdefghijklmnopqrstuvwxyz"
    assert model.generate_until(requests((long, given))) == model.generate_until(requests((long[-10:], given)))
    with pytest.raises(BatchgenError, match=r"max_gen_toks \(16\) leaves no room for a prompt; .* 16 tokens"):
        model.generate_until(requests((long, {"max_gen_toks": 16})))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, SamplingParams(max_tokens=256, stop=("<|im_end|>",))),
        ({"max_new_tokens": 5, "until": ["a"]}, SamplingParams(max_tokens=5, stop=("a", "<|im_end|>"))),
        ({"temperature": 0.5, "top_p": 0.9}, SamplingParams(256, 0.5, 0.9, stop=("<|im_end|>",))),
        ({"do_sample": True, "top_k": 3}, SamplingParams(256, 1.0, top_k=3, stop=("<|im_end|>",))),
        ({"do_sample": False, "temperature": 1}, SamplingParams(256, 0.0, stop=("<|im_end|>",))),
        ({"best_of": 3}, "batchgen has no 'best_of'"),
        ({"n": 3}, "batchgen has no 'n'"),
        ({"top_p": 2.0}, r"generation_kwargs\.top_p: .*1"),
    ],
)
def test_generation_arguments(tiny_session, given: dict[str, Any], expected: SamplingParams | str) -> None:
    model = BatchgenLM(tiny_session)
    if isinstance(expected, SamplingParams):
        assert model._params(given) == expected
        return
    with pytest.raises(BatchgenError, match=expected):
        model._params(given)


def test_repeated_samples_differ(tiny_session) -> None:
    drawn = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12}
    answers = BatchgenLM(tiny_session).generate_until(requests(*[("hello", drawn)] * 3))
    assert len(set(answers)) == 3


# Chats


def test_chats_are_rendered_by_the_models_template(tiny_session) -> None:
    model = BatchgenLM(tiny_session)
    chat = [{"role": "user", "content": "hello"}]
    assert model.apply_chat_template(chat) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant"
    begun = [*chat, {"role": "assistant", "content": "The answer is "}]
    text = model.apply_chat_template(begun, add_generation_prompt=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nThe answer is "
    assert "im_start" in model.chat_template(True) and tiny_session.model.tokenizer.fingerprint in model.tokenizer_name


@pytest.mark.parametrize("refuses", ["system messages", "all"])
def test_a_template_that_refuses_system_messages_gets_the_others(tiny_session, monkeypatch, refuses: str) -> None:
    def render(messages: list[dict[str, str]], **options: Any) -> str:
        if refuses == "all" or messages[0]["role"] == "system":
            raise RowError("template_error", "no such role")
        return messages[0]["content"]

    monkeypatch.setattr(tiny_session.model.chat, "render", render)
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    if refuses == "system messages":
        assert BatchgenLM(tiny_session).apply_chat_template(chat) == "b"
        return
    for messages in (chat, chat[1:]):
        with pytest.raises(BatchgenError, match="no such role"):
            BatchgenLM(tiny_session).apply_chat_template(messages)


# Tasks


def test_a_few_shot_task_pays_for_its_header_once(tiny_session, tmp_path: Path, monkeypatch) -> None:
    """Every choice of every row is scored; the sum of what is computed is little more than the header and questions."""
    write_tasks(tmp_path, 3)
    scores: list[Any] = []
    score = tiny_session.score

    def spy(*args: Any) -> list[Any]:
        scores.extend(score(*args))
        return scores

    monkeypatch.setattr(tiny_session, "score", spy)
    found = evaluate(BatchgenLM(tiny_session), ["choices"], tmp_path)
    samples = found["samples"]["choices"]
    assert len(samples) == 3 and sum(len(sample["resps"]) for sample in samples) == len(scores) > 6
    contexts = {context for sample in samples for context, _ in sample["arguments"]}
    assert all(context.count("Question:") == SHOTS + 1 for context in contexts)
    read = sum(each.num_prompt_tokens for each in scores)
    computed = read - sum(each.num_cached_tokens for each in scores)
    assert computed < read / 5
    best = [max(range(len(s["resps"])), key=lambda i, s=s: s["resps"][i][0][0]) == s["target"] for s in samples]
    assert found["results"]["choices"]["acc,none"] == sum(best) / 3


def test_the_command_line_is_the_harnesss_own(tiny_path: Path, tmp_path: Path, capsys) -> None:
    write_tasks(tmp_path, 2)
    output = tmp_path / "results.json"
    arguments = ["--tasks", "choices,answers,code", "--include_path", str(tmp_path), "--output_path", str(output)]
    own = ["--model_args", "kernel=reference,threads=1", "max_length=512", "--batch_size", "8"]
    assert cli.main(["lm-eval", "--model", str(tiny_path), *arguments, *own]) == 0
    [written] = tmp_path.glob("results_*.json")
    results = json.loads(written.read_text())["results"]
    assert set(results) == {"choices", "answers", "code"} and results["code"]["bits_per_byte,none"] > 0
    assert "|choices|" in capsys.readouterr().out.replace(" ", "")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--model_args", "wieghts=fp32"], "wieghts"),
        (["--model_args", "weights=fp31"], "model.weights"),
    ],
)
def test_mistakes_are_one_line(tiny_path: Path, tmp_path: Path, capsys, arguments: list[str], line: str) -> None:
    write_tasks(tmp_path, 1)
    tasks = ["--tasks", "code", "--include_path", str(tmp_path)]
    assert cli.main(["lm-eval", "--model", str(tiny_path), *tasks, *arguments]) == SpecError.exit_code
    errors = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1 and line in errors[0]


def test_a_model_by_name_needs_a_source() -> None:
    assert get_model("batchgen") is BatchgenLM
    with pytest.raises(BatchgenError, match="source is missing"):
        BatchgenLM.create_from_arg_string("weights=fp32")


def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    path.write_bytes(tiny_gguf({"tokenizer.chat_template": None}))
    model = BatchgenLM.create_from_arg_string(f"source={path},kernel=reference")
    with pytest.raises(BatchgenError, match="no chat template"):
        model.apply_chat_template([{"role": "user", "content": "a"}])


def test_without_the_harness_there_is_one_line() -> None:
    code = "import sys; sys.modules['lm_eval'] = None; from batchgen.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "lm-eval", "--model", "m", "--tasks", "t"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert "pip install 'batchgen[lm-eval]'" in result.stderr
