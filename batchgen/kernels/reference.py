"""The oracle: every operation of a backend in plain numpy, written to be read rather than to be fast.

Sums and exponentials are taken in float64, activations and the KV cache are float32. Matrix products go through
numpy's BLAS, whose order of summation depends on the shapes: unlike the kernels, results may differ in their last bits
with what else is in a step.
"""

from collections.abc import Callable, Sequence
from math import erf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen.kernels.base import Codes, Matrix, ModelShape, Ops, StepBatch, StepLimits, StepResult

Floats = NDArray[np.float32]
WEIGHT_TYPES, KV_TYPES = ("fp32", "bf16", "native", "int8"), ("fp32", "bf16", "int8", "q8_0")

SMALLEST = 2e-38
"""Weights of tokens below this fraction of the likeliest one's count as zero (float32 has no normal numbers there)."""


def round_bf16(values: Floats) -> Floats:
    """The nearest bfloat16 of each value, ties to even, as float32; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    kept = bits & np.uint32(0xFFFF0000)
    rest = bits & np.uint32(0xFFFF)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    up = (rest > 0x8000) | ((rest == 0x8000) & (odd == 1))
    rounded = (kept + up.astype(np.uint32) * np.uint32(0x10000)).view(np.float32)
    return np.where(np.isnan(values), np.float32(np.nan), rounded).astype(np.float32)


def stored(values: Floats, dtype: str) -> Floats:
    """What remains of float32 values kept as "fp32", "bf16", "int8" (a scale per row) or "q8_0" (one per 32).

    "native" are a file's own codes, whose values are rounded to bfloat16 when they are multiplied.
    """
    if dtype in ("int8", "q8_0"):
        return round_int8(values, values.shape[-1] if dtype == "int8" else 32)
    return round_bf16(values) if dtype in ("bf16", "native") else np.array(values, np.float32)


def round_int8(values: Floats, group: int) -> Floats:
    """Groups of the last axis as multiples of absmax / 127, rounded to nearest even. The last group may be short."""
    size = values.shape[-1]
    padded = np.zeros((*values.shape[:-1], -(-size // group) * group), np.float32)
    padded[..., :size] = values
    groups = padded.reshape(*values.shape[:-1], padded.shape[-1] // group, group)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 1e-35)
    codes = np.rint(groups * inverse)
    return (codes * (largest * np.float32(1 / 127))).reshape(padded.shape)[..., :size].astype(np.float32)


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """RMSNorm (Zhang & Sennrich 2019) over the last axis."""
    mean_square = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    return (x / np.sqrt(mean_square + eps) * weight).astype(np.float32)


def swiglu(gate: Floats, up: Floats | np.float32) -> Floats:
    """SiLU(gate) * up (Shazeer 2020)."""
    with np.errstate(over="ignore"):
        return (gate / (1 + np.exp(-gate.astype(np.float64))) * up).astype(np.float32)


def layer_norm(x: Floats, weight: Floats, bias: Floats | None, eps: float) -> Floats:
    """LayerNorm (Ba et al. 2016) over the last axis."""
    centred = (x - np.mean(x, axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    normed = rms_norm(centred, weight, eps)
    return normed if bias is None else normed + bias


def final_norm(x: Floats, weight: Floats, bias: Floats | None, eps: float, centred: bool) -> Floats:
    """LayerNorm if `centred`, else RMSNorm, over the last axis."""
    return layer_norm(x, weight, bias, eps) if centred else rms_norm(x, weight, eps)


def gelu_tanh(x: Floats) -> Floats:
    """GELU in the approximation by tanh (Hendrycks & Gimpel 2016)."""
    wide = x.astype(np.float64)
    return (0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))).astype(np.float32)


def gelu(x: Floats) -> Floats:
    """GELU by the error function."""
    return (0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x / np.sqrt(2.0)))).astype(np.float32)


def silu(x: Floats) -> Floats:
    return swiglu(x, np.float32(1))


def expert_shares(routing: Floats, chosen: int, normalised: bool) -> Floats:
    """(rows, experts): the softmax over all, zero but for the `chosen` largest, the first of equal ones."""
    shares = softmax(routing.astype(np.float64))
    order = np.argsort(-routing, axis=1, kind="stable")[:, chosen:]
    np.put_along_axis(shares, order, 0.0, axis=1)
    total = shares.sum(axis=1, keepdims=True) if normalised else 1.0
    return (shares / total).astype(np.float32)


def soft_capped(values: Any, cap: float) -> Any:
    """cap * tanh(values / cap) (Gemma 2); a cap of 0 is none."""
    return cap * np.tanh(values / cap) if cap else values


def rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotary embedding (Su et al. 2021), dimension i paired with i + half: x (T, heads, head_dim), cos (T, half)."""
    left, right = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis; -inf becomes 0."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    """Over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def causal_attention(q: Floats, k: Floats, v: Floats, window: int = 0, soft_cap: float = 0.0) -> Floats:
    """The last tokens of a sequence attend to all of it: q (T, heads, dim); k and v (n, kv_heads, dim), n >= T.

    Query t has position n - T + t and sees the keys up to its own, or the last `window` of these. Neighbouring heads
    share a KV head.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(a, group, axis=1).astype(np.float64) for a in (k, v))
    scores = soft_capped(np.einsum("thd,nhd->htn", q, keys) / np.sqrt(q.shape[-1]), soft_cap)
    distance = np.arange(len(k) - len(q), len(k))[:, None] - np.arange(len(k))
    weights = softmax(np.where((distance < 0) | (distance >= (window or len(k))), -np.inf, scores))
    return np.einsum("htn,nhd->thd", weights, values).astype(np.float32)


def sequence_slots(batch: StepBatch, sequence: int, page_size: int) -> NDArray[np.int64]:
    """Where the KV of all tokens of a sequence lies, in order."""
    at = np.arange(batch.seq_lens[sequence], dtype=np.int64)
    return batch.block_tables[sequence, at // page_size].astype(np.int64) * page_size + at % page_size


class EagerOps:
    """`Ops` that computes at once; handles are arrays of (rows, columns) float32.

    keys, values: (layers, slots, kv_heads, head_dim). rope: cos and sin (tables, positions, head_dim / 2).
    `tokens` and `logprobs` are there after `sample_head`, `logits` with them.
    """

    def __init__(
        self,
        batch: StepBatch,
        shape: ModelShape,
        page_size: int,
        keys: Floats,
        values: Floats,
        rope: tuple[Floats, Floats],
        kv_dtype: str,
        weights_dtype: str,
    ):
        self._batch, self._shape, self._page_size = batch, shape, page_size
        self._keys, self._values, self._rope, self._kv_dtype = keys, values, rope, kv_dtype
        self._weights_dtype = weights_dtype
        self.logits: Floats = np.zeros((0, shape.vocab_size), np.float32)
        self.tokens = np.zeros(0, np.int32)
        self.logprobs: Floats = np.zeros(0, np.float32)
        self.hidden: Floats = np.zeros((0, 0), np.float32)
        self._clear_pages()

    def _clear_pages(self) -> None:
        """A new page holds NaN, so that reading a slot which nobody has written shows."""
        pages = self._batch.cleared_pages.astype(np.int64)[:, None]
        slots = pages * self._page_size + np.arange(self._page_size)
        self._keys[:, slots.ravel()] = np.nan
        self._values[:, slots.ravel()] = np.nan

    def embed(self, table: Floats) -> Floats:
        return table[self._batch.input_ids]

    def add_positions(self, x: Floats, table: Floats) -> Floats:
        return x + table[self._batch.positions]

    def rms_norm(self, x: Floats, weight: Floats, eps: float, kept: bool = False) -> Floats:
        return rms_norm(x, weight, eps)

    def layer_norm(
        self, x: Floats, weight: Floats, bias: Floats | None, eps: float, kept: bool = False, final: bool = False
    ) -> Floats:
        return layer_norm(x[self._batch.logits_rows] if final else x, weight, bias, eps)

    def operand(self, x: Floats) -> Floats:
        return x

    def add_bias(self, x: Floats, bias: Floats) -> Floats:
        return x + bias

    def norm_columns(self, x: Floats, first: int, groups: int, weight: Floats, eps: float, centred: bool) -> Floats:
        end = first + len(weight)
        parts, weights = x[:, first:end].reshape(len(x), groups, -1), weight.reshape(groups, -1)
        normed = layer_norm(parts, weights, None, eps) if centred else rms_norm(parts, weights, eps)
        return np.concatenate([x[:, :first], normed.reshape(len(x), -1), x[:, end:]], axis=1)

    def add_normed(self, x: Floats, weight: Floats, eps: float, residual: Floats) -> Floats:
        return residual + rms_norm(x, weight, eps)

    def activate(self, x: Floats, columns: int, kind: str, gated: bool) -> Floats:
        value = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}[kind](x[:, :columns])
        return value * x[:, columns : 2 * columns] if gated else value

    def linear(self, x: Floats, weight: Floats) -> Floats:
        """With int8 weights the rows of `x` are rounded to int8 too, each with a scale of its own."""
        return (stored(x, "int8") if self._weights_dtype == "int8" else x) @ weight.T

    def linear_add(self, x: Floats, weight: Floats, residual: Floats) -> Floats:
        return residual + self.linear(x, weight)

    def linear_swiglu(self, x: Floats, weight: tuple[Floats, Floats]) -> Floats:
        gate, up = weight
        return swiglu(self.linear(x, gate), self.linear(x, up))

    def add_experts(
        self, x: Floats, routing: Floats, gate_up: Sequence[tuple[Floats, Floats]], down: Sequence[Floats], chosen: int,
        normalised: bool, residual: Floats,
    ) -> Floats:  # fmt: skip
        """Expert by expert, in order, for the rows that chose it."""
        shares, out = expert_shares(routing[:, : len(down)], chosen, normalised), residual.copy()
        for expert in range(len(down)):
            rows = np.flatnonzero(shares[:, expert])
            results = self.linear(self.linear_swiglu(x[rows], gate_up[expert]), down[expert])
            out[rows] += shares[rows, expert, None] * results
        return out

    def rope_and_cache(self, qkv: Floats, layer: int, table: int = 0) -> Floats:
        """Rotate q and k, write k and v into the cache; returns q (T, heads, head_dim)."""
        batch, s = self._batch, self._shape
        heads = qkv.reshape(len(qkv), s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        q, k, v = np.split(heads, [s.num_heads, s.num_heads + s.num_kv_heads], axis=1)
        cos, sin = (values[table][batch.positions] for values in self._rope)
        self._keys[layer, batch.slot_mapping] = stored(rotate(k, cos, sin), self._kv_dtype)
        self._values[layer, batch.slot_mapping] = stored(v, self._kv_dtype)
        return rotate(q, cos, sin)

    def attention(self, q: Floats, layer: int, window: int = 0, soft_cap: float = 0.0) -> Floats:
        """Sequence by sequence over its gathered KV, after the step's copies."""
        keys, values, batch = self._keys[layer], self._values[layer], self._batch
        sources, targets = batch.copies[:, 0], batch.copies[:, 1]
        keys[targets], values[targets] = keys[sources], values[sources]
        out = np.zeros_like(q)
        for s in range(len(batch.seq_lens)):
            rows = slice(batch.cu_seqlens_q[s], batch.cu_seqlens_q[s + 1])
            slots = sequence_slots(batch, s, self._page_size)
            out[rows] = causal_attention(q[rows], keys[slots], values[slots], window, soft_cap)
        return out.reshape(len(q), -1)

    def final_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        return rms_norm(x[self._batch.logits_rows], weight, eps)

    def hidden_states(self, x: Floats, weight: Floats, bias: Floats | None, eps: float, centred: bool) -> None:
        self.hidden = final_norm(x[self._batch.logits_rows], weight, bias, eps, centred)

    def sample_head(self, x: Floats, weight: Floats, soft_cap: float = 0.0) -> None:
        batch = self._batch
        self.logits = soft_capped(self.linear(x, weight), soft_cap)
        rows = batch.samples["row"]
        self.tokens = np.array([self._draw(sample) for sample in batch.samples], np.int32)
        asked = np.where(batch.samples["scored"], batch.samples["target"], self.tokens)
        self.logprobs = log_softmax(self.logits)[rows, asked].astype(np.float32)

    def _draw(self, sample: np.void) -> int:
        logits = self.logits[sample["row"]]
        if sample["scored"] or not self._batch.needs_logits[sample["row"]]:
            return int(np.argmax(logits))
        return sample_row(logits, sample, self._batch.history, self._batch.suppress)


class ReferenceBackend:
    """See `kernels.base.Backend`. Runs the model's operations one by one in every step.

    weights_dtype and kv_dtype: what `WEIGHT_TYPES` and `KV_TYPES` name; values are rounded so and kept in float32.
    """

    name = "cpu"
    kernel = "reference"
    wants_codes = False
    host_memory = True
    kv_layout = "slots"

    def __init__(self, weights_dtype: str = "fp32", kv_dtype: str = "fp32"):
        for dtype, known in ((weights_dtype, WEIGHT_TYPES), (kv_dtype, KV_TYPES)):
            if dtype not in known:
                raise ValueError(f"dtype {dtype} is not supported; {', '.join(known)} are")
        self.weights_dtype, self.kv_dtype = weights_dtype, kv_dtype

    def vector(self, values: Floats) -> Floats:
        return np.array(values, np.float32)

    def table(self, rows: Floats) -> Floats:
        return stored(rows, "fp32" if self.weights_dtype == "fp32" else "bf16")

    def linear(self, parts: Sequence[Matrix]) -> Floats:
        return stored(np.concatenate([p.weights() if isinstance(p, Codes) else p for p in parts]), self.weights_dtype)

    def gated_pair(self, gate: Matrix, up: Matrix) -> tuple[Floats, Floats]:
        return self.linear([gate]), self.linear([up])

    def page_bytes(self, shape: ModelShape, page_size: int) -> int:
        """Bytes of the keys and values of all layers; rounded values, too, are kept in float32."""
        return shape.num_layers * shape.num_kv_heads * shape.head_dim * page_size * 2 * 4

    def build(
        self, forward: Callable[[Ops], None], shape: ModelShape, limits: StepLimits, rope: tuple[Floats, Floats]
    ) -> None:
        self._forward, self._shape, self._page_size, self._rope = forward, shape, limits.page_size, rope
        slots = limits.num_pages * limits.page_size
        self._kv = np.zeros((2, shape.num_layers, slots, shape.num_kv_heads, shape.head_dim), np.float32)
        self._keys, self._values = self._kv

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def run(self, batch: StepBatch) -> StepResult:
        """Execute one step; all logits rows are returned, whether they were asked for or not."""
        ops = EagerOps(
            batch, self._shape, self._page_size, self._keys, self._values, self._rope, self.kv_dtype, self.weights_dtype
        )
        self._forward(ops)
        return StepResult(ops.tokens, ops.logprobs, ops.logits, ops.hidden)

    def read_page(self, page: int) -> NDArray[np.uint8]:
        return self._kv[:, :, self._slots(page)].flatten().view(np.uint8)

    def write_page(self, page: int, data: NDArray[np.uint8]) -> None:
        place = self._kv[:, :, self._slots(page)]
        place[:] = np.ascontiguousarray(data).view(np.float32).reshape(place.shape)

    def _slots(self, page: int) -> slice:
        return slice(page * self._page_size, (page + 1) * self._page_size)

    def close(self) -> None:
        """Nothing is held but memory."""


# Sampling. Order: penalties, forbidden tokens, temperature, min-p, top-k, top-p, draw (as in vLLM).


def philox4x32(counter: Sequence[int], key: Sequence[int], rounds: int = 10) -> tuple[int, int, int, int]:
    """Philox4x32 (Salmon et al. 2011): four 32-bit counter words and two key words give four random words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = high >> 32 ^ c1 ^ k0, high & 0xFFFFFFFF, low >> 32 ^ c3 ^ k1, low & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def philox_uniform(key: int, token_index: int, sample_number: int) -> float:
    """A float64 in [0, 1) from the upper 53 of the first 64 random bits; counter (token_index, sample_number, 0, 0)."""
    key = int(key)
    counter = (int(token_index) & 0xFFFFFFFF, int(sample_number) & 0xFFFFFFFF, 0, 0)
    first, second, _, _ = philox4x32(counter, (key & 0xFFFFFFFF, key >> 32))
    return float((first << 32 | second) >> 11) * 2.0**-53


def penalised(logits: Floats, sample: np.void, history: NDArray[np.int32]) -> Floats:
    """Logits after the penalties for the tokens of `history`.

    Repetition divides a positive logit and multiplies another, once, for every token of prompt or output. Frequency is
    subtracted for each time a token was generated, presence once for each token that was generated.
    """
    begin, middle, end = (int(sample[f"history_{edge}"]) for edge in ("begin", "prompt_end", "end"))
    x = np.array(logits, np.float32)
    seen = np.unique(history[begin:end])
    repetition = np.float32(sample["repetition_penalty"])
    x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
    generated, times = np.unique(history[middle:end], return_counts=True)
    x[generated] -= (sample["frequency_penalty"] * times + sample["presence_penalty"]).astype(np.float32)
    return x


def likelihoods(x: Floats, temperature: float) -> NDArray[np.float64]:
    """exp((x - max) / temperature): 1 for the likeliest token."""
    p = np.exp((x.astype(np.float64) - x.max()) / temperature)
    return np.where(p < SMALLEST, 0, p)


def keep_top_k(p: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Zero all that are less likely than the k-th likeliest; its equals stay."""
    return np.where(p < np.sort(p)[-k], 0, p) if 0 < k < len(p) else p


def keep_top_p(p: NDArray[np.float64], top_p: float) -> NDArray[np.float64]:
    """Keep the fewest likeliest tokens whose sum reaches `top_p` of the whole; of equals, lower ids come first."""
    if top_p >= 1:
        return p
    order = np.argsort(-p, kind="stable")
    needed = int(np.searchsorted(np.cumsum(p[order]), top_p * p.sum())) + 1
    kept = np.zeros_like(p)
    kept[order[:needed]] = p[order[:needed]]
    return kept


def filtered_likelihoods(
    logits: Floats, sample: np.void, history: NDArray[np.int32], suppress: NDArray[np.int32]
) -> NDArray[np.float64]:
    """(vocabulary,) weights, not normalised, of a draw at a temperature above zero."""
    p = likelihoods(unforbidden(logits, sample, history, suppress), float(sample["temperature"]))
    p = np.where(p < sample["min_p"], 0, p)
    return keep_top_p(keep_top_k(p, int(sample["top_k"])), float(sample["top_p"]))


def unforbidden(logits: Floats, sample: np.void, history: NDArray[np.int32], suppress: NDArray[np.int32]) -> Floats:
    """Logits after penalties, -inf at the forbidden tokens."""
    x = penalised(logits, sample, history)
    x[suppress[int(sample["suppress_begin"]) : int(sample["suppress_end"])]] = -np.inf
    return x


def inverse_cdf(p: NDArray[np.float64], uniform: float) -> int:
    """The first token at which the sum of weights in token order exceeds `uniform` of the whole."""
    cumulative = np.cumsum(p)
    return min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), int(np.flatnonzero(p)[-1]))


def sample_row(logits: Floats, sample: np.void, history: NDArray[np.int32], suppress: NDArray[np.int32]) -> int:
    """The token that a `SAMPLE_DTYPE` record draws from one row of logits (vocabulary,)."""
    if sample["greedy"]:
        return int(np.argmax(unforbidden(logits, sample, history, suppress)))
    uniform = philox_uniform(sample["rng_key"], sample["token_index"], sample["sample_number"])
    return inverse_cdf(filtered_likelihoods(logits, sample, history, suppress), uniform)
