"""What an engine asks of a backend, and the arrays of one step.

A backend owns its arrays: packed weights, the KV cache, activations. A model describes itself once by calling the
operations of `Ops` (models/decoder.py); a backend may execute them at once, step after step (the numpy reference), or
record them at load and replay the recording every step (the CPU and CUDA kernels). A step's inputs arrive in one
piece, a `StepBatch`; nothing returns to Python between its first operation and its sampled tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

KEY_BLOCK = 32
"""Keys that attention takes at a time; the page size is a multiple of it."""

SAMPLE_DTYPE = np.dtype(
    [
        ("row", np.int64),  # which logits row
        ("greedy", np.int64),
        ("scored", np.int64),  # whether `target` is asked about and nothing is drawn
        ("target", np.int64),
        ("top_k", np.int64),
        ("rng_key", np.uint64),
        ("sample_number", np.int64),
        ("token_index", np.int64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("history_begin", np.int64),  # [begin, prompt_end) prompt tokens, [prompt_end, end) generated ones
        ("history_prompt_end", np.int64),
        ("history_end", np.int64),
        ("suppress_begin", np.int64),
        ("suppress_end", np.int64),
    ]
)
"""One token to draw, or a given one to score. Where nothing but the arg-max is wanted, `needs_logits` is false for its
row."""


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A quantised matrix (outputs, inputs): weight = scale * code + minimum, all of a group of consecutive inputs.

    `bits`: 4 for codes from 0 to 15, 8 for int8. Scales and minima (outputs, inputs / group) float32.
    """

    values: NDArray[Any]
    bits: int
    scales: NDArray[np.float32]
    minima: NDArray[np.float32] | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def group(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def format(self) -> tuple[int, int, bool]:
        """What must be equal for matrices to lie side by side: bits, group, whether there are minima."""
        return self.bits, self.group, self.minima is not None

    def rows(self, order: NDArray[np.int64]) -> "Codes":
        minima = None if self.minima is None else self.minima[order]
        return Codes(self.values[order], self.bits, self.scales[order], minima)

    def weights(self) -> NDArray[np.float32]:
        """(outputs, inputs); each product of a scale and a code is exact in float32."""
        products = np.repeat(self.scales, self.group, axis=1) * self.values.astype(np.float32)
        return products if self.minima is None else products + np.repeat(self.minima, self.group, axis=1)


Matrix = NDArray[np.float32] | Codes
"""(outputs, inputs)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that decide memory; `context_length` in tokens."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most a step may hold: tokens; sequences, and as many tokens that want logits; and the KV cache in pages.

    A page has `page_size` tokens.
    """

    max_tokens: int
    max_seqs: int
    num_pages: int
    page_size: int


@dataclass(slots=True, eq=False)
class StepBatch:
    """One step in flat arrays; T tokens of S sequences, R of which want logits, from which Q tokens are sampled.

    Every sequence contributes `cu_seqlens_q[s+1] - cu_seqlens_q[s]` consecutive tokens, the last of which is number
    `seq_lens[s] - 1` of its sequence. `copies` are (source, destination) slots whose KV is copied after this step's KV
    is written and before attention reads it. `cleared_pages` are newly allocated. `shared_runs` rows are
    (first sequence, end sequence, leading pages that these sequences share).
    """

    input_ids: NDArray[np.int32]  # (T,)
    positions: NDArray[np.int32]  # (T,)
    slot_mapping: NDArray[np.int64]  # (T,) page * page_size + offset
    block_tables: NDArray[np.int32]  # (S, pages of the longest)
    cu_seqlens_q: NDArray[np.int32]  # (S + 1,)
    seq_lens: NDArray[np.int32]  # (S,)
    logits_rows: NDArray[np.int32]  # (R,) token numbers in this step
    needs_logits: NDArray[np.bool_]  # (R,) whether whole rows of logits are wanted
    samples: NDArray[np.void]  # (Q,) SAMPLE_DTYPE
    history: NDArray[np.int32]  # tokens that penalties look at
    suppress: NDArray[np.int32]  # tokens that must not be sampled
    copies: NDArray[np.int64]  # (C, 2)
    cleared_pages: NDArray[np.int32]
    shared_runs: NDArray[np.int32]  # (G, 3)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


def single_token_batch() -> StepBatch:
    """The smallest step there is: token 0 at position 0 in page 0, greedy."""
    none = np.zeros(0, np.int32)
    sample = np.zeros(1, SAMPLE_DTYPE)
    sample["greedy"] = 1
    return StepBatch(
        input_ids=np.zeros(1, np.int32),
        positions=np.zeros(1, np.int32),
        slot_mapping=np.zeros(1, np.int64),
        block_tables=np.zeros((1, 1), np.int32),
        cu_seqlens_q=np.array([0, 1], np.int32),
        seq_lens=np.ones(1, np.int32),
        logits_rows=np.zeros(1, np.int32),
        needs_logits=np.zeros(1, np.bool_),
        samples=sample,
        history=none,
        suppress=none,
        copies=np.zeros((0, 2), np.int64),
        cleared_pages=none,
        shared_runs=np.zeros((0, 3), np.int32),
    )


@dataclass(slots=True, eq=False)
class StepResult:
    """Sampled tokens with their log-probabilities under the model's own distribution (before temperature and filters).

    Of a scored sample the token is the likeliest one, the log-probability the target's.
    `logits` (at least R rows, vocabulary) float32 is a view that the next step overwrites; the rows of `needs_logits`
    are valid. Where the model ends with `Ops.hidden_states`, `hidden` (R, hidden size) float32 is all there is.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    logits: NDArray[np.float32]
    hidden: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))


class Ops(Protocol):
    """The operations a decoder is made of. Handles are the backend's own; shapes are (rows of the step, columns).

    The residual stream (of `embed`) and results of `linear` are changed in place by what adds to them or normalises
    them. A result of a norm lasts until the next one, or until the next that is `kept`, too.
    """

    def embed(self, table: Any) -> Any: ...
    def add_positions(self, x: Any, table: Any) -> Any:
        """Add to each row that of `table` at the token's position."""
        ...

    def rms_norm(self, x: Any, weight: Any, eps: float, kept: bool = False) -> Any: ...
    def layer_norm(
        self, x: Any, weight: Any, bias: Any | None, eps: float, kept: bool = False, final: bool = False
    ) -> Any:
        """`final`: of the rows that want logits, as `final_norm`."""
        ...

    def operand(self, x: Any) -> Any:
        """The residual stream itself, to be multiplied."""
        ...

    def linear(self, x: Any, weight: Any) -> Any: ...
    def add_bias(self, x: Any, bias: Any) -> Any: ...
    def norm_columns(self, x: Any, first: int, groups: int, weight: Any, eps: float, centred: bool) -> Any:
        """RMSNorm, or LayerNorm if `centred`, of as many columns from `first` on as `weight` has, in equal groups."""
        ...

    def rope_and_cache(self, qkv: Any, layer: int, table: int = 0) -> Any:
        """`table`: which of the rotary tables that `build` was given."""
        ...

    def attention(self, q: Any, layer: int, window: int = 0, soft_cap: float = 0.0) -> Any:
        """`window`: keys that a query sees, itself included (0: all). `soft_cap` c makes scores c * tanh(score / c)."""
        ...

    def linear_add(self, x: Any, weight: Any, residual: Any) -> Any: ...
    def add_normed(self, x: Any, weight: Any, eps: float, residual: Any) -> Any:
        """Add the RMSNorm of a linear's result to the residual stream."""
        ...

    def linear_swiglu(self, x: Any, weight: Any) -> Any: ...
    def activate(self, x: Any, columns: int, kind: str, gated: bool) -> Any:
        """`silu`, `gelu` or `gelu_tanh` of a linear's `columns`, if `gated` times as many that follow."""
        ...

    def add_experts(
        self, x: Any, routing: Any, gate_up: Sequence[Any], down: Sequence[Any], chosen: int, normalised: bool,
        residual: Any,
    ) -> Any:  # fmt: skip
        """Add to each row its `chosen` experts' results, each a SwiGLU and a linear (Shazeer et al. 2017).

        Their shares are the softmax of the `routing` row over all experts, `normalised` to sum to 1 or not; of equal
        ones the first experts are chosen.
        """
        ...

    def final_norm(self, x: Any, weight: Any, eps: float) -> Any: ...
    def sample_head(self, x: Any, weight: Any, soft_cap: float = 0.0) -> None: ...
    def hidden_states(self, x: Any, weight: Any, bias: Any | None, eps: float, centred: bool) -> None:
        """In place of the last two: the step's result is the norm of rows that want logits, LayerNorm if `centred`."""
        ...


class Backend(Protocol):
    """Weights, memory and execution on one device.

    `vector`, `table`, `linear` and `gated_pair` pack weights; linears are given as matrices (outputs, inputs) that are
    laid side by side, as `Codes` only where `wants_codes`. `build` receives a function that calls `Ops`, and cosines
    and sines of the rotary tables, each (tables, positions, head_dim / 2).
    `host_memory`: whether pages lie in the memory that the process itself uses. `kv_layout` names the order of a page's
    bytes.
    """

    name: str
    kernel: str
    weights_dtype: str
    kv_dtype: str
    wants_codes: bool
    host_memory: bool
    kv_layout: str

    def vector(self, values: NDArray[np.float32]) -> Any: ...
    def table(self, rows: NDArray[np.float32]) -> Any: ...
    def linear(self, parts: Sequence[Matrix]) -> Any: ...
    def gated_pair(self, gate: Matrix, up: Matrix) -> Any: ...
    def page_bytes(self, shape: ModelShape, page_size: int) -> int: ...
    def build(
        self,
        forward: Callable[[Ops], None],
        shape: ModelShape,
        limits: StepLimits,
        rope: tuple[NDArray[np.float32], NDArray[np.float32]],
    ) -> None: ...
    def warm_up(self) -> None:
        """Compile, or load from disk, what the first step would otherwise wait for."""
        ...

    def run(self, batch: StepBatch) -> StepResult: ...
    def read_page(self, page: int) -> NDArray[np.uint8]:
        """A copy of a page's keys and values, (page_bytes,), between two steps."""
        ...

    def write_page(self, page: int, data: NDArray[np.uint8]) -> None:
        """Put what `read_page` gave, of any page, into this one; ValueError for another size."""
        ...

    def close(self) -> None: ...
