"""Drawing one token from a row of logits.

Order of operations as in vLLM: penalties, forbidden tokens, temperature, min-p, top-k, top-p, draw. Ties in top-p
are ordered by token id; a value equal to the k-th largest survives top-k. The draw is the inverse of the cumulative
distribution in token order at a uniform number from Philox4x32-10 (Salmon et al. 2011), counter (token index, sample
number), so it depends on nothing but the row itself.
"""

import numpy as np

from batchgen.kernels.cpu import simd
from batchgen.kernels.cpu.compiling import helper

LOG2_E = 1.4426950408889634
NEVER = np.float32(-np.inf)
SMALLEST = np.float32(2e-38)  # exp2 ends at 2**-126
MASK = np.uint64(0xFFFFFFFF)


@helper
def philox_uniform(key, token_index, sample_number):
    """A float64 in [0, 1) with 53 random bits."""
    shift = np.uint64(32)
    c0, c1 = np.uint64(token_index) & MASK, np.uint64(sample_number) & MASK
    c2, c3 = np.uint64(0), np.uint64(0)
    k0, k1 = key & MASK, key >> shift
    for _ in range(10):
        low, high = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (high >> shift) ^ c1 ^ k0, high & MASK, (low >> shift) ^ c3 ^ k1, low & MASK
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & MASK, (k1 + np.uint64(0xBB67AE85)) & MASK
    bits = ((c0 << shift) | c1) >> np.uint64(11)
    return np.float64(np.int64(bits)) * 1.1102230246251565e-16


@helper
def apply_penalties(x, sample, history, counts):
    """Repetition (prompt and output), then frequency and presence (output). `counts` is zero before and after."""
    begin, middle, end = sample.history_begin, sample.history_prompt_end, sample.history_end
    repetition = np.float32(sample.repetition_penalty)
    for i in range(begin, end):
        token = history[i]
        if counts[token] == 0:
            x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        counts[token] += 1
    for i in range(begin, end):
        counts[history[i]] = 0
    for i in range(middle, end):
        counts[history[i]] += 1
    for i in range(middle, end):
        token = history[i]
        if counts[token] > 0:
            x[token] -= np.float32(sample.frequency_penalty * counts[token] + sample.presence_penalty)
            counts[token] = 0


@helper
def exponentials(x, vocab, temperature):
    """x -> exp((x - max) / temperature) in place, exactly 1 at the maximum, 0 where x is -inf."""
    top = NEVER
    for i in range(vocab):
        top = max(top, x[i])
    # A temperature near zero would make this infinite, and 0 * inf is NaN.
    scale = simd.broadcast(np.float32(min(LOG2_E / temperature, 1e30)))
    address = x.ctypes.data
    for i in range(0, vocab, 16):
        # The tail past the vocabulary holds -inf.
        simd.store(address + i * 4, simd.exp2((simd.load(address + i * 4) - simd.broadcast(top)) * scale))
    for i in range(vocab):
        if x[i] < SMALLEST:
            x[i] = 0


@helper
def keep_top_k(p, vocab, k):
    threshold = np.partition(p[:vocab], vocab - k)[vocab - k]
    for i in range(vocab):
        if p[i] < threshold:
            p[i] = 0


@helper
def keep_top_p(p, vocab, top_p):
    """Zero all but the likeliest tokens whose mass reaches `top_p` of the whole.

    Looks at the tokens above a falling threshold, so that the few that matter are sorted and not the vocabulary.
    """
    total = 0.0
    for i in range(vocab):
        total += p[i]
    wanted, threshold, mass = total * top_p, 0.1, 0.0
    while threshold > 1e-30:
        mass = 0.0
        for i in range(vocab):
            if p[i] >= threshold:
                mass += p[i]
        if mass >= wanted:
            break
        threshold *= 0.05
    if mass < wanted:
        threshold = 0.0
    above = np.nonzero(p[:vocab] >= threshold)[0]
    order = np.argsort(-p[above], kind="mergesort")
    mass, kept = 0.0, len(above)
    for n in range(len(above)):
        mass += p[above[order[n]]]
        if mass >= wanted:
            kept = n + 1
            break
    last = p[above[order[kept - 1]]]
    for i in range(vocab):
        if p[i] < last:
            p[i] = 0
    for n in range(kept, len(above)):
        p[above[order[n]]] = 0


@helper
def draw(p, vocab, uniform):
    total = 0.0
    for i in range(vocab):
        total += p[i]
    wanted, mass, last = uniform * total, 0.0, 0
    for i in range(vocab):
        if p[i] > 0:
            mass += p[i]
            last = i
            if mass > wanted:
                return i
    return last


@helper
def arg_max(x, vocab):
    best = 0
    for i in range(1, vocab):
        if x[i] > x[best]:
            best = i
    return best


@helper
def sample_row(logits, work, vocab, sample, history, suppress, counts):
    """The token drawn from `logits` (vocab,); scratch: `work` (vocab rounded up to 16,), `counts` (vocab,)."""
    work[:vocab] = logits[:vocab]
    work[vocab:] = NEVER
    if sample.history_end > sample.history_begin:
        apply_penalties(work, sample, history, counts)
    for i in range(sample.suppress_begin, sample.suppress_end):
        work[suppress[i]] = NEVER
    if sample.greedy:
        return arg_max(work, vocab)
    exponentials(work, vocab, sample.temperature)
    if sample.min_p > 0:
        for i in range(vocab):
            if work[i] < sample.min_p:
                work[i] = 0
    if 0 < sample.top_k < vocab:
        keep_top_k(work, vocab, sample.top_k)
    if sample.top_p < 1:
        keep_top_p(work, vocab, sample.top_p)
    return draw(work, vocab, philox_uniform(sample.rng_key, sample.token_index, sample.sample_number))
