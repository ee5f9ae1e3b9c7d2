"""A model in memory that answers lists of requests, without a job's folder.

    with Session.open(ModelSpec(source="model.gguf")) as session:
        answers = session.generate(["The sky is"], SamplingParams(max_tokens=8))
        scores = session.score(["The sky is"] * 2, [" blue", " green"])

The requests of one call are planned together, as the rows of a job are: a prefix that they share is computed once, and
no answer depends on the others. Texts are taken as rendered: control tokens' spellings are these tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.planner import Admission
from batchgen.engine.prompt_table import MemoryStore, PromptTable, PromptTableBuilder
from batchgen.engine.requests import RowWish, make_requests
from batchgen.engine.types import SCORING, RequestOutput, RowFailure, SamplingParams
from batchgen.errors import SpecError
from batchgen.kernels.base import Backend
from batchgen.loading import ModelFile, load_model, locate_model, open_device, open_model, resolve_numerics
from batchgen.prompt_sources import encode_all
from batchgen.prompts import Wishes
from batchgen.run_plan import make_engine, plan_run, step_limits
from batchgen.scored_sources import (
    Window,
    bounds_of,
    join,
    or_failure,
    or_raise,
    parts_of,
    rolling_windows,
    split_spaces,
    windows_of,
)
from batchgen.spec import EngineSpec, ModelSpec

Tokens = NDArray[np.int32]
Prompt = str | Sequence[int] | Tokens
OnDone = Callable[[int], None]


@dataclass(frozen=True, slots=True, eq=False)
class TextScore:
    """Natural logarithms of the probabilities (float32) of a text's tokens (int32); `is_greedy`: each is the likeliest.

    With an `error` it has none. Of `num_prompt_tokens` read for it `num_cached_tokens` were computed for another.
    """

    token_ids: Tokens
    logprobs: NDArray[np.float32]
    is_greedy: bool
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: RowFailure | None = None

    @property
    def logprob(self) -> float:
        return float(np.sum(self.logprobs, dtype=np.float64))


def _nobody(done: int) -> None:
    pass


class Session:
    """`open` one, call it as often as you like (from one thread), and `close` it.

    `on_done` is told, step by step, how many of the prompts (of scores: windows) are done.
    """

    def __init__(self, model: ModelFile, backend: Backend, engine: EngineSpec, num_pages: int):
        shape = model.config.shape
        self.model, self.context_length = model, shape.context_length
        self._backend, self._engine, self._num_pages = backend, engine, num_pages
        self._admission = Admission(shape.context_length, shape.vocab_size, num_pages * engine.page_size)

    @classmethod
    def open(
        cls,
        model: ModelSpec,
        engine: EngineSpec | None = None,
        on_message: Callable[[str], None] = lambda text: None,
    ) -> "Session":
        """Load a model. Raises ModelError for one that cannot be, SpecError for what does not go with it."""
        engine = engine or EngineSpec()
        if engine.cache.is_on:
            raise SpecError("engine.cache keeps prefixes for later jobs; a session has none")
        numerics = resolve_numerics(model, engine)
        path, _ = locate_model(model, on_message)
        file = open_model(path, model.pre_tokenizer)
        device = open_device(file, numerics, engine)
        load_model(file, device.backend, step_limits(engine, device.most_pages), on_message)
        return cls(file, device.backend, engine, device.most_pages)

    def close(self) -> None:
        self._backend.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(self, prompts: Sequence[Prompt]) -> list[Tokens | RowFailure]:
        """The tokens of each, as the methods below make them; equal texts are encoded once."""
        texts = list(dict.fromkeys(prompt for prompt in prompts if isinstance(prompt, str)))
        encoded = encode_all(lambda part: self.model.tokenizer.encode_batch(part, parse_special=True), texts)
        known = dict(zip(texts, parts_of(encoded), strict=True))
        return [known[prompt] if isinstance(prompt, str) else np.array(prompt, np.int32) for prompt in prompts]

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams], on_done: OnDone = _nobody
    ) -> list[RequestOutput]:
        """An answer to each prompt, under the same parameters or each under its own; of equal ones the k-th is the
        k-th sample. What cannot be answered has an `error`."""
        asked = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        encoded = [_not_empty(prompt) for prompt in self.encode(prompts)]
        good = [place for place, prompt in enumerate(encoded) if not isinstance(prompt, RowFailure)]
        table = PromptTable.from_prompts([or_raise(encoded[place]) for place in good], np.array(good, np.int64))
        answers = {o.row_index: o for o in self._run(table, _wishes([asked[place] for place in good]), on_done)}
        for place, prompt in enumerate(encoded):
            if isinstance(prompt, RowFailure):
                answers[place] = RequestOutput(place, 0, "error", error=prompt)
        return [answers[place] for place in range(len(prompts))]

    def score(
        self,
        contexts: Sequence[Prompt],
        continuations: Sequence[Prompt],
        max_length: int | None = None,
        on_done: OnDone = _nobody,
    ) -> list[TextScore]:
        """What each continuation's tokens get after its context, by lm-evaluation-harness's rules (scored_sources.py):
        of texts, tokens are those of both together; what does not fit `max_length` is cut off the context."""
        bounds = bounds_of(self.model.tokenizer, self._length(max_length))
        pairs = [_pair(*pair) for pair in zip(contexts, continuations, strict=True)]
        encoded = self.encode([part for pair in pairs for part in pair])

        def window(place: int) -> list[Window]:
            context, tail = map(or_raise, encoded[2 * place : 2 * place + 2])
            whole = isinstance(pairs[place][1], str)
            return [join(context, tail[len(context) :] if whole else tail, bounds)]

        return self._score([or_failure(window, place) for place in range(len(pairs))], on_done)

    def rolling(
        self, texts: Sequence[Prompt], max_length: int | None = None, on_done: OnDone = _nobody
    ) -> list[TextScore]:
        """What each text's own tokens get, every one predicted once, in windows of `max_length` tokens."""
        bounds = bounds_of(self.model.tokenizer, self._length(max_length))

        def windows(tokens: Tokens | RowFailure) -> list[Window]:
            return list(rolling_windows(or_raise(tokens), bounds.max_length, bounds))

        return self._score([or_failure(windows, tokens) for tokens in self.encode(texts)], on_done)

    def _length(self, max_length: int | None) -> int:
        return min(max_length or self.context_length, self.context_length)

    def _score(self, rows: list[list[Window] | RowFailure], on_done: OnDone) -> list[TextScore]:
        encoded = windows_of(rows)
        assert encoded.scored is not None
        builder, count = PromptTableBuilder(MemoryStore()), len(encoded.lengths)
        builder.append(encoded.tokens, encoded.lengths, encoded.scored.rows)
        wishes = Wishes(
            [RowWish(SCORING, 1, False)], np.zeros(count, np.int32), np.zeros(count, np.int64), encoded.scored
        )
        outputs: list[list[RequestOutput]] = [[] for _ in rows]
        for output in self._run(builder.finish(), wishes, on_done):
            outputs[output.row_index].append(output)
        return [_joined(row, parts) for row, parts in zip(rows, outputs, strict=True)]

    def _run(self, table: PromptTable, wishes: Wishes, on_done: OnDone) -> list[RequestOutput]:
        """The results of all, as they come."""
        sharing, most = self._engine.prefix_sharing, self._engine.max_num_seqs
        plan = plan_run(table, wishes, self._admission, self._engine)
        requests = make_requests(table, plan.prefixes, plan.order, wishes.__getitem__, sharing=sharing)
        model, outputs = self.model, list[RequestOutput]()
        engine = make_engine(self._backend, model.tokenizer, model.config.shape, self._engine, self._num_pages)
        while True:
            for request in islice(requests, max(0, most - engine.scheduler.num_waiting)):
                engine.submit(request)
            if not engine.has_work:
                return outputs
            outputs += engine.step()[0]
            on_done(len(outputs))


def _not_empty(prompt: Tokens | RowFailure) -> Tokens | RowFailure:
    if isinstance(prompt, RowFailure) or len(prompt):
        return prompt
    return RowFailure("prompt_missing", "the prompt has no tokens")


def _wishes(asked: Sequence[SamplingParams]) -> Wishes:
    """One answer under each of the parameters."""
    numbers = {params: number for number, params in enumerate(dict.fromkeys(asked))}
    wishes = [RowWish(params, 1, False) for params in numbers]
    return Wishes(wishes, np.array([numbers[p] for p in asked], np.int32), np.zeros(len(asked), np.int64))


def _pair(context: Prompt, continuation: Prompt) -> tuple[Prompt, Prompt]:
    """What is encoded: of two texts the context, and both together; token ids stay apart."""
    if not isinstance(continuation, str):
        return context, continuation
    if not isinstance(context, str):
        raise TypeError("a context of token ids goes with a continuation of token ids")
    kept, tail = split_spaces(context, continuation)
    return kept, kept + tail


def _joined(row: list[Window] | RowFailure, parts: list[RequestOutput]) -> TextScore:
    """The score of a text from those of its windows."""
    errors = [part.error for part in parts if part.error is not None]
    error = row if isinstance(row, RowFailure) else next(iter(errors), None)
    if error is not None:
        return TextScore(np.zeros(0, np.int32), np.zeros(0, np.float32), False, error=error)
    parts.sort(key=lambda part: part.sample_index)
    return TextScore(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        all(part.is_greedy for part in parts),
        sum(part.num_prompt_tokens for part in parts),
        sum(part.num_cached_tokens for part in parts),
    )
