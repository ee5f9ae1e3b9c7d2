"""lm-evaluation-harness (0.4.13) with batchgen as its model: `batchgen` among the harness's names, or

    with Session.open(ModelSpec(source="model.gguf")) as session:
        results = lm_eval.simple_evaluate(model=BatchgenLM(session), tasks=["hellaswag"], num_fewshot=5)

The harness hands over all requests of a kind at once, those of all tasks together. They are one plan: what their
prompts share, the examples of a few-shot task above all, is computed once, and there is no batch size to choose.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from batchgen.engine.types import RowFailure, SamplingParams
from batchgen.errors import BatchgenError, RowError
from batchgen.scored_sources import or_raise
from batchgen.session import OnDone, Session
from batchgen.spec import ModelSpec, SamplingSpec, model_job

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
    from tqdm import tqdm
except ModuleNotFoundError as error:
    text = f"lm-evaluation-harness cannot be imported ({error}); python -m pip install 'batchgen[lm-eval]'"
    raise BatchgenError(text) from None

NOT_OURS = ("batch_size", "max_batch_size", "device", "trust_remote_code")
"""Arguments that the harness gives every model (its command line a device, too), and that mean nothing here."""
NO_SAMPLING = ("max_tokens", "n", "stop", "temperature")
"""What generation arguments cannot set under these names: the harness has names of its own for them."""


@register_model("batchgen")
class BatchgenLM(LM):
    """`max_length`: most tokens that a prediction may see, at most (and by default) the model's context.

    `max_gen_toks`: most tokens of an answer where a task says nothing. A request that cannot be answered stops the
    evaluation with a BatchgenError, as it would count as a wrong answer otherwise.
    """

    def __init__(self, session: Session, max_length: int | None = None, max_gen_toks: int = 256):
        super().__init__()
        self._session, self.max_gen_toks = session, max_gen_toks
        self.max_length = min(max_length or session.context_length, session.context_length)
        self._tokenizer = session.model.tokenizer

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "BatchgenLM":
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> "BatchgenLM":
        """From `source`, arguments of the class, and keys of a spec's `model` and `engine`."""
        given = {**arg_dict, **{k: v for k, v in (additional_config or {}).items() if v is not None}}
        own = {name: given.pop(name) for name in ("max_length", "max_gen_toks") if name in given}
        if "source" not in given:
            raise BatchgenError("model_args: source is missing: a path, hf:org/name or pypi:name==version/file")
        source = str(given.pop("source"))
        job = model_job(source, [_override(name, value) for name, value in given.items() if name not in NOT_OURS])
        return cls(Session.open(job.model, job.engine, lambda text: print(text, file=sys.stderr)), **own)

    # Scores

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        contexts, continuations = ([request.args[part] for request in requests] for part in (0, 1))
        with _progress("loglikelihood", len(requests), disable_tqdm) as on_done:
            scores = self._session.score(contexts, continuations, self.max_length, on_done)
        _check(requests, [score.error for score in scores])
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        asked = [request for request in requests if request.args[0]]  # of no text the harness takes the logarithm as 0
        with _progress("loglikelihood_rolling", None, disable_tqdm) as on_done:
            found = self._session.rolling([request.args[0] for request in asked], self.max_length, on_done)
        _check(asked, [score.error for score in found])
        scores = iter(found)
        return [next(scores).logprob if request.args[0] else 0.0 for request in requests]

    # Answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers without what stops them. Contexts are cut on the left so that the longest answer fits beside."""
        params = [self._params(request.args[1]) for request in requests]
        encoded = self._session.encode([request.args[0] for request in requests])
        _check(requests, [prompt if isinstance(prompt, RowFailure) else None for prompt in encoded])
        prompts = [or_raise(prompt)[-self._room(wanted) :] for prompt, wanted in zip(encoded, params, strict=True)]
        with _progress("generate_until", len(requests), disable_tqdm) as on_done:
            answers = self._session.generate(prompts, params, on_done)
        _check(requests, [answer.error for answer in answers])
        return [answer.text or "" for answer in answers]

    def _room(self, params: SamplingParams) -> int:
        """Tokens that a context may have."""
        room = self.max_length - params.max_tokens
        if room < 1:
            text = f"generation_kwargs: max_gen_toks ({params.max_tokens}) leaves no room for a prompt"
            raise BatchgenError(f"{text}; the model sees {self.max_length} tokens")
        return room

    def _params(self, given: dict[str, Any]) -> SamplingParams:
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        stop = handle_stop_sequences(kwargs.pop("until"), self._tokenizer.eos_token)
        max_tokens, samples = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample")
        temperature = kwargs.pop("temperature", 1.0)
        if kwargs.get("num_beams") == 1:
            del kwargs["num_beams"]
        values = {"max_tokens": max_tokens, "stop": [text for text in stop if text], **kwargs}
        return _sampling(values | {"temperature": temperature if samples else 0.0}, kwargs)

    # Chat

    @property
    def tokenizer_name(self) -> str:
        """Part of the key under which the harness keeps requests: the same for the same tokens and chat template."""
        return f"batchgen-{self._tokenizer.fingerprint}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self._tokenizer.chat_template or ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Without a generation prompt the last message is left open, to be gone on with. A template that refuses system
        messages gets the others, as in the harness's `hf`."""
        others = [message for message in chat_history if message["role"] != "system"]
        try:
            return self._rendered(chat_history, add_generation_prompt)
        except BatchgenError:
            if len(others) == len(chat_history):
                raise
        return self._rendered(others, add_generation_prompt)

    def _rendered(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        chat = self._session.model.chat
        if chat is None:
            raise BatchgenError("--apply_chat_template: the model has no chat template")
        try:
            text = chat.render(messages, add_generation_prompt=add_generation_prompt)
        except RowError as error:
            raise BatchgenError(error.message) from None
        return text if add_generation_prompt else _left_open(text, messages[-1]["content"])


def _left_open(text: str, last: str) -> str:
    """A rendered chat up to where its last message ends; templates may strip that."""
    at = text.rfind(last.strip())
    kept = last.lstrip() if text[at:].startswith(last.lstrip()) else last.strip()
    return text[: at + len(kept)]


def _override(name: str, value: Any) -> str:
    section = "model" if name in ModelSpec.model_fields else "engine"
    return f"{section}.{name}={json.dumps(value)}"


def _sampling(values: Mapping[str, Any], own_names: Mapping[str, Any]) -> SamplingParams:
    spec = SamplingSpec()
    known = [name for name in spec.names if name not in NO_SAMPLING]
    for name in own_names:
        if name not in known:
            text = f"generation_kwargs: batchgen has no '{name}'"
            raise BatchgenError(f"{text}; beside until, max_gen_toks, do_sample and temperature: {', '.join(known)}")
    try:
        return spec.with_values({}, values, "generation_kwargs")[0]
    except RowError as error:
        raise BatchgenError(error.message) from None


def _check(requests: Sequence[Any], failures: Sequence[RowFailure | None]) -> None:
    for request, failure in zip(requests, failures, strict=True):
        if failure is not None:
            where = f"task {request.task_name}, document {request.doc_id}"
            raise BatchgenError(f"{where}: {failure.code}: {failure.message}")


@contextmanager
def _progress(name: str, total: int | None, hidden: bool) -> Iterator[OnDone]:
    with tqdm(total=total, desc=f"batchgen {name}", disable=hidden) as bar:

        def on_done(done: int) -> None:
            bar.update(done - bar.n)

        yield on_done


def run_harness(source: str, arguments: Sequence[str]) -> None:
    """The harness's own command line, `lm-eval run`, with this model; the other arguments are the harness's."""
    from lm_eval.__main__ import cli_evaluate

    model = ["--model", "batchgen", "--model_args", json.dumps({"source": source})]
    before, sys.argv = sys.argv, ["batchgen lm-eval", "run", *model, *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
