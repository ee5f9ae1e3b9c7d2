"""A backend without a model, and a rig that drives the engine on it, checking everything after every step.

rig = Rig(HashModel(vocab_size=50), vocab_size=50)
outputs = rig.run(requests_for([[1, 2, 3], [1, 2]], RowWish(SamplingParams(max_tokens=4), n=1, own_seed=False)))
outputs[0, 0].token_ids
"""

import codecs
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from batchgen.engine.cache_tiers import CacheTiers, KeyChain, Store, Stores, TierPolicy, prefix_root
from batchgen.engine.engine import Engine, EngineLimits
from batchgen.engine.planner import plan_prefixes
from batchgen.engine.prompt_table import PromptTable
from batchgen.engine.requests import RowWish, make_requests
from batchgen.engine.run_order import plan_order
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.types import Request, RequestOutput, StepRecord
from batchgen.errors import BatchgenError
from batchgen.kernels.base import StepBatch, StepResult

POISON = -7
"""The token in a slot that nobody has written since its page was cleared or freed."""
PENDING = 0
"""The prefix hash of a slot written in this step, until the step's first reader fills it in."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to draw: all tokens before it as they stand in the cache, and what the sampler asked for.

    `random` is None for a greedy draw, else (key, sample number, token index, temperature, top_k, top_p, min_p);
    `penalties` is None or (number of prompt tokens, repetition, presence, frequency).
    """

    context: tuple[int, ...]
    random: tuple[float, ...] | None = None
    penalties: tuple[float, ...] | None = None
    suppress: tuple[int, ...] = ()


Model = Callable[[Draw], tuple[int, float]]
"""The token drawn and its log-probability."""


class HashModel:
    """A token and a log-probability that depend on everything in the `Draw`, and on nothing else."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def __call__(self, draw: Draw) -> tuple[int, float]:
        digest = hashlib.blake2b(repr((draw.context, draw.random, draw.penalties)).encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        allowed = [token for token in range(self.vocab_size) if token not in draw.suppress]
        return allowed[number % len(allowed)], -(number >> 40) / 2**22


def scripted(answers: dict[tuple[int, ...], Sequence[int]], logprob: float = -1.0) -> Model:
    """A model that answers each of these prompts with these tokens."""

    def model(draw: Draw) -> tuple[int, float]:
        for prompt, answer in answers.items():
            given = draw.context[len(prompt) :]
            if draw.context[: len(prompt)] == prompt and given == tuple(answer[: len(given)]):
                return answer[len(given)], logprob
        raise AssertionError(f"no answer is known for {draw.context}")

    return model


def prefix_hashes(tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
    """For each token a hash of it, its position and all tokens before it; never 0."""
    factors = np.random.default_rng(len(tokens) and 1).integers(1, 2**63, len(tokens), np.uint64) | np.uint64(1)
    return np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * factors, dtype=np.uint64) | np.uint64(1)


class BrokenContract(BatchgenError, AssertionError):
    """What a backend is asked to do makes no sense; the engine must not take it for the fault of a row."""


class MockBackend:
    """The `run` of a backend whose KV cache remembers, per slot, token, position and a hash of the prefix.

    As in a real one, a step clears pages, writes its tokens, makes the copies, and then every sequence reads its whole
    context through its block table. Whatever it finds that is not exactly its own prefix is a BrokenContract.

    `batches` are those that have run.
    """

    def __init__(self, model: Model, num_pages: int, page_size: int):
        self.model, self.page_size = model, page_size
        self.batches: list[StepBatch] = []
        self._tokens = np.full(num_pages * page_size, POISON, np.int32)
        self._positions = np.full(num_pages * page_size, POISON, np.int32)
        self._prefixes = np.full(num_pages * page_size, PENDING, np.uint64)
        self._ready = np.zeros(num_pages, bool)  # handed over as cleared since they were last free

    def poison(self, pages: Iterable[int]) -> None:
        """Forget what is in these pages; to be called with those that are free."""
        numbers = np.array(sorted(pages), np.int64)
        self._ready[numbers] = False
        self._tokens.reshape(-1, self.page_size)[numbers] = POISON

    def run(self, batch: StepBatch) -> StepResult:
        try:
            result = self._run(batch)
        except AssertionError as error:
            raise BrokenContract(str(error)) from error
        self.batches.append(batch)
        return result

    def _run(self, batch: StepBatch) -> StepResult:
        self._check_arrays(batch)
        self._check_shared_runs(batch)
        self._clear(batch.cleared_pages)
        self._write(batch)
        self._copy(batch)
        contexts = [self._read(batch, s) for s in range(len(batch.seq_lens))]
        return self._draw_all(batch, contexts)

    def read_page(self, page: int) -> NDArray[np.uint8]:
        """Tokens, positions and prefixes of its slots, one after the other."""
        assert self._ready[page]
        own = slice(page * self.page_size, (page + 1) * self.page_size)
        assert (self._tokens[own] != POISON).all(), f"page {page} is saved before it is full"
        return np.concatenate([a[own].view(np.uint8) for a in (self._tokens, self._positions, self._prefixes)])

    def write_page(self, page: int, data: NDArray[np.uint8]) -> None:
        own, size = slice(page * self.page_size, (page + 1) * self.page_size), 4 * self.page_size
        parts = np.split(data, [size, 2 * size])
        for array, part in zip((self._tokens, self._positions, self._prefixes), parts, strict=True):
            array[own] = part.view(array.dtype)
        self._ready[page] = True

    def _check_arrays(self, batch: StepBatch) -> None:
        counts = np.diff(batch.cu_seqlens_q)
        assert batch.num_tokens == batch.cu_seqlens_q[-1] == len(batch.positions) == len(batch.slot_mapping)
        assert batch.cu_seqlens_q[0] == 0 and (counts > 0).all()
        assert len(batch.block_tables) == len(batch.seq_lens) == len(counts)
        positions = [np.arange(n - count, n) for n, count in zip(batch.seq_lens, counts, strict=True)]
        np.testing.assert_array_equal(batch.positions, np.concatenate(positions))
        assert (np.diff(batch.logits_rows) > 0).all()
        inner = ~np.isin(batch.logits_rows, batch.cu_seqlens_q[1:] - 1)  # those of one sequence run to its end
        assert np.isin(batch.logits_rows[inner] + 1, batch.logits_rows).all()
        assert len(batch.needs_logits) == len(batch.logits_rows)
        assert set(batch.samples["row"].tolist()) == set(range(len(batch.logits_rows)))

    def _check_shared_runs(self, batch: StepBatch) -> None:
        starts, counts, last = batch.seq_lens - np.diff(batch.cu_seqlens_q), np.diff(batch.cu_seqlens_q), 0
        for first, end, pages in batch.shared_runs.tolist():
            assert last <= first and end - first >= 2 and pages >= 1
            assert (counts[first:end] == 1).all() and (starts[first:end] >= pages * self.page_size).all()
            table = batch.block_tables[first:end, :pages]
            assert (table == table[0]).all() and (table >= 0).all()
            last = end

    def _clear(self, pages: NDArray[np.int32]) -> None:
        assert len(set(pages.tolist())) == len(pages), "a page is handed over twice"
        self._ready[pages] = True
        self._tokens.reshape(-1, self.page_size)[pages] = POISON

    def _write(self, batch: StepBatch) -> None:
        slots = batch.slot_mapping
        assert len(np.unique(slots)) == len(slots), "two tokens are written to one slot"
        assert self._ready[slots // self.page_size].all(), "a token is written to a page that was never handed over"
        self._tokens[slots], self._positions[slots] = batch.input_ids, batch.positions
        self._prefixes[slots] = PENDING

    def _copy(self, batch: StepBatch) -> None:
        sources, targets = batch.copies.T
        assert len(np.unique(targets)) == len(targets) and not np.isin(targets, sources).any()
        assert not np.isin(targets, batch.slot_mapping).any()
        assert self._ready[targets // self.page_size].all()
        for array in (self._tokens, self._positions, self._prefixes):
            array[targets] = array[sources]

    def _read(self, batch: StepBatch, s: int) -> NDArray[np.int32]:
        """All tokens of a sequence, checked."""
        length = int(batch.seq_lens[s])
        pages = batch.block_tables[s, : -(-length // self.page_size)].astype(np.int64)
        assert (pages >= 0).all()
        slots = (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)[:length]
        tokens = self._tokens[slots]
        assert (tokens != POISON).all(), f"sequence {s} reads a slot without a token at {np.argmax(tokens == POISON)}"
        np.testing.assert_array_equal(self._positions[slots], np.arange(length))
        hashes, stored = prefix_hashes(tokens), self._prefixes[slots]
        known = stored != PENDING
        assert (stored[known] == hashes[known]).all(), f"sequence {s} reads keys that belong to another prefix"
        self._prefixes[slots] = hashes
        own = slice(batch.cu_seqlens_q[s], batch.cu_seqlens_q[s + 1])
        np.testing.assert_array_equal(batch.slot_mapping[own], slots[length - (own.stop - own.start) :])
        return tokens

    def _draw_all(self, batch: StepBatch, contexts: list[NDArray[np.int32]]) -> StepResult:
        owner = np.searchsorted(batch.cu_seqlens_q, batch.logits_rows, side="right") - 1
        ends = batch.positions[batch.logits_rows] + 1
        seen = [contexts[owner[row]][: ends[row]] for row in batch.samples["row"]]
        drawn = [
            _result(self.model, batch, sample, context) for sample, context in zip(batch.samples, seen, strict=True)
        ]
        tokens, logprobs = [token for token, _ in drawn], [logprob for _, logprob in drawn]
        return StepResult(np.array(tokens, np.int32), np.array(logprobs, np.float32), np.zeros((0, 0), np.float32))


def scored(model: Model, context: tuple[int, ...], target: int) -> tuple[int, float]:
    """The likeliest token, and a log-probability that depends on the target, too."""
    return model(Draw(context))[0], model(Draw((*context, target)))[1]


def _result(model: Model, batch: StepBatch, sample: np.void, context: NDArray[np.int32]) -> tuple[int, float]:
    if sample["scored"]:
        assert batch.needs_logits[sample["row"]]
        return scored(model, tuple(context.tolist()), int(sample["target"]))
    return model(_draw_of(batch, sample, context))


def _draw_of(batch: StepBatch, sample: np.void, context: NDArray[np.int32]) -> Draw:
    begin, prompt_end, end = (int(sample[name]) for name in ("history_begin", "history_prompt_end", "history_end"))
    names = ("rng_key", "sample_number", "token_index", "temperature", "top_k", "top_p", "min_p")
    random = None if sample["greedy"] else tuple(sample[name].item() for name in names)
    penalties = None
    if begin < end:
        np.testing.assert_array_equal(batch.history[begin:end], context)
        scales = (sample[f"{name}_penalty"].item() for name in ("repetition", "presence", "frequency"))
        penalties = (prompt_end - begin, *scales)
    suppress = tuple(batch.suppress[sample["suppress_begin"] : sample["suppress_end"]].tolist())
    if random or penalties or suppress:
        assert batch.needs_logits[sample["row"]]
    return Draw(tuple(context.tolist()), random, penalties, suppress)


class ByteDetokenizer:
    """Tokens that stand for bytes, UTF-8 put together: a character may be spread over several tokens."""

    def __init__(self, pieces: Sequence[bytes], eos: Iterable[int] = (0,)):
        self._pieces = pieces
        self.eos_token_ids = frozenset(eos)

    def decode(self, ids: NDArray[np.int32]) -> str:
        return b"".join(self._pieces[i] for i in ids).decode("utf-8", "replace")

    def incremental(self) -> "ByteStream":
        return ByteStream(self._pieces)


class ByteStream:
    def __init__(self, pieces: Sequence[bytes]):
        self._pieces, self._decoder = pieces, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._pieces[token_id])


def letters(vocab_size: int) -> ByteDetokenizer:
    """Token 0 is the end token, the others are a, b, c, …, a, b, …"""
    return ByteDetokenizer([b"", *(bytes([97 + i % 26]) for i in range(vocab_size - 1))])


def hope_for_the_best(scheduler: Scheduler) -> None:
    scheduler._may_risk = lambda sequence: not sequence.set_back  # type: ignore[method-assign]
    scheduler._lengths.tokens = lambda room: 1  # type: ignore[method-assign]


@dataclass(eq=False)
class Rig:
    """An engine on a `MockBackend`; after every step all pages are accounted for, and free ones are poisoned.

    `rash`: whoever does not fit is admitted as if it were to answer with one token. `store`: a tier below the device.
    """

    model: Model
    detokenizer: ByteDetokenizer | None = None
    max_batch_tokens: int = 256
    max_num_seqs: int = 16
    num_pages: int = 64
    page_size: int = 32
    context_length: int = 1024
    vocab_size: int = 64
    prefix_sharing: bool = True
    prefill_first: bool = False
    rash: bool = False
    store: Store | None = None
    policy: TierPolicy = field(default_factory=lambda: TierPolicy(async_backup=False))
    outputs: dict[tuple[int, int], RequestOutput] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.backend = MockBackend(self.model, self.num_pages, self.page_size)
        limits = EngineLimits(
            self.max_batch_tokens,
            self.max_num_seqs,
            self.num_pages,
            self.page_size,
            self.context_length,
            self.vocab_size,
            self.prefix_sharing,
            self.prefill_first,
        )
        ticks = itertools.count(10)
        detokenizer = self.detokenizer or letters(self.vocab_size)
        self.tiers = self._open_tiers()
        self.engine = Engine(
            self.backend,
            detokenizer,
            limits,
            tiers=self.tiers,
            clock=lambda: next(ticks) ** 2,  # type: ignore[arg-type]
        )
        if self.rash:
            hope_for_the_best(self.engine.scheduler)

    def _open_tiers(self) -> CacheTiers | None:
        if self.store is None:
            return None
        chain = KeyChain(prefix_root({"page_size": self.page_size}), self.page_size)
        size, backend = 16 * self.page_size, self.backend
        return CacheTiers(Stores([self.store]), chain, size, backend.read_page, self.policy, lambda text: None)

    @property
    def prefill_tokens(self) -> int:
        return sum(record.num_prefill_tokens for record in self.records)

    @property
    def most_pages(self) -> int:
        return max((record.pages_used for record in self.records), default=0)

    @property
    def copies(self) -> list[list[tuple[int, int]]]:
        """(source, target) slots of every step."""
        return [[(s, d) for s, d in batch.copies.tolist()] for batch in self.backend.batches]

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.engine.submit(request)

    def step(self) -> list[RequestOutput]:
        before = len(self.backend.batches)
        outputs, record = self.engine.step()
        holders = [list(pages) for pages in self.engine.scheduler.page_holders()]
        self.engine.blocks.check_integrity(holders)
        self.backend.poison(set(range(self.num_pages)) - set(itertools.chain(*holders)))
        if record is not None:
            self._check(record, self.backend.batches[before:])
        for output in outputs:
            assert (output.row_index, output.sample_index) not in self.outputs, "answered twice"
            self.outputs[output.row_index, output.sample_index] = output
        return outputs

    def run(self, requests: Iterable[Request] = (), max_steps: int = 10_000) -> dict[tuple[int, int], RequestOutput]:
        """Submit these requests and step until nothing is left."""
        self.submit(requests)
        while self.engine.has_work:
            assert len(self.records) <= max_steps, "the engine does not get on"
            self.step()
        self.engine.scheduler.drop_frontiers()  # nothing more comes
        assert self.engine.blocks.num_used == 0
        return self.outputs

    def _check(self, record: StepRecord, batches: list[StepBatch]) -> None:
        """Against what has run: one batch, or several where something failed."""
        last = self.records[-1] if self.records else None
        assert record.step == len(self.records)
        assert last is None or record.start_ns >= last.start_ns + last.duration_ns
        parts = record.schedule_ns + record.forward_ns + record.sample_ns + record.write_ns
        assert parts == record.duration_ns and min(record.schedule_ns, record.forward_ns, record.sample_ns) > 0
        assert 1 <= record.num_prefill_tokens + record.num_decode_tokens <= self.max_batch_tokens
        assert record.num_prefill_tokens + record.num_decode_tokens == sum(batch.num_tokens for batch in batches)
        context = sum(int(batch.positions.sum()) + batch.num_tokens for batch in batches)
        assert record.num_prefill_context + record.num_decode_context == context
        assert 1 <= record.num_seqs == sum(len(batch.seq_lens) for batch in batches) <= self.max_num_seqs
        assert sum(len(batch.logits_rows) for batch in batches) <= self.max_num_seqs
        assert record.pages_used <= self.num_pages
        self.records.append(record)


def prompt_table(prompts: Iterable[Iterable[int]]) -> PromptTable:
    """Row i is prompt i."""
    arrays = [np.array(list(prompt), np.int32) for prompt in prompts]
    return PromptTable.from_prompts(arrays, np.arange(len(arrays)))


def requests_for(
    prompts: Iterable[Iterable[int]], wishes: RowWish | Sequence[RowWish], *, sharing: bool = True
) -> list[Request]:
    """The requests of a table in plan order; one wish for all rows, or one for each."""
    table = prompt_table(prompts)
    each = [wishes] * len(table) if isinstance(wishes, RowWish) else wishes
    plan = plan_prefixes(table)
    return list(make_requests(table, plan, plan_order(plan), each.__getitem__, sharing=sharing))


def trie_size(prompts: Iterable[Iterable[int]]) -> int:
    """Number of distinct non-empty prefixes."""
    return len({tuple(prompt)[:end] for prompt in map(list, prompts) for end in range(1, len(prompt) + 1)})
