"""Weights kept as a file's own codes: the same bits as the bfloat16 that they stand for."""

import numpy as np
import pytest

from batchgen.io.gguf_codes import UNPACKERS
from batchgen.kernels.cpu.backend import aligned_zeros
from batchgen.kernels.cpu.pack import rows_to_bf16
from batchgen.kernels.reference import round_bf16
from tests.kernels.conftest import require
from tests.kernels.kernel_programs import build, every_token, head, logits_of, relative_error, same_bits, signs
from tests.quantised import random_codes

HIDDEN, TOKENS, COUNTS = 256, 64, (1, 17, 64)


@pytest.fixture(params=["portable", "avx512_bf16", "amx_bf16"])
def kernel(request):
    require(request.param)
    return request.param


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def check(open_backend, kernel, program_of, matrices, vocab):
    """The program gives the same bits for codes as for floats; `matrices` are pairs of (codes, floats)."""
    native, plain = (
        build(open_backend(kernel, weights), program_of(*(m[form] for m in matrices)), HIDDEN, vocab)
        for form, weights in enumerate(("native", "bf16"))
    )
    for count in COUNTS:
        batch = every_token(range(count))
        got, expected = logits_of(native, batch), logits_of(plain, batch)
        assert np.ptp(expected) > 0
        assert same_bits(got, expected), count


def random_pairs(rng, *shapes):
    """A (codes, floats) pair for each (type, outputs), of `HIDDEN` inputs."""
    return [random_codes(rng, kind, outputs, HIDDEN) for kind, outputs in shapes]


@pytest.mark.parametrize("kind", UNPACKERS)
@pytest.mark.parametrize("outputs", [32, 77])
def test_products(kernel, open_backend, rng, kind, outputs):
    table, norm = signs(rng, TOKENS, HIDDEN), round_bf16(rng.standard_normal(HIDDEN).astype(np.float32))
    check(open_backend, kernel, lambda w: head(table, norm, w), random_pairs(rng, (kind, outputs)), outputs)


def test_products_are_those_of_the_floats_rounded_to_bfloat16(kernel, open_backend, rng):
    """Not only the same as another packing: what numpy makes of gguf's values."""
    table, norm = signs(rng, TOKENS, HIDDEN), np.ones(HIDDEN, np.float32)
    ((codes, floats),) = random_pairs(rng, ("Q4_K", 40))
    backend = build(open_backend(kernel, "native"), head(table, norm, codes), HIDDEN, 40)
    expected = table.astype(np.float64) @ round_bf16(floats).T.astype(np.float64)
    assert relative_error(logits_of(backend, every_token(range(TOKENS))), expected) < 3e-6


def residual_program(rng, pack):
    """norm(x + linear(x)), the linear being `pack(backend, *matrices)`."""
    table = signs(rng, TOKENS, HIDDEN)

    def program_of(*matrices):
        def program(backend):
            packed, weight = backend.table(table), pack(backend, *matrices)
            ones, eye = backend.vector(np.ones(HIDDEN, np.float32)), backend.linear([np.eye(HIDDEN, dtype=np.float32)])

            def forward(ops):
                x = ops.embed(packed)
                x = ops.linear_add(ops.rms_norm(x, ones, 0.0), weight, x)
                ops.sample_head(ops.final_norm(x, ones, 1e-5), eye)

            return forward

        return program

    return program_of


PARTS = {
    "one format, multiples of 32": [("Q4_K", 192), ("Q4_K", 32), ("Q4_0", 32)],
    "one format, others": [("Q8_0", 100), ("Q5_0", 17), ("Q8_0", 139)],
    "two formats, multiples of 32": [("Q4_K", 160), ("Q6_K", 96)],
    "two formats, others": [("Q4_K", 150), ("Q6_K", 106)],
    "four formats": [("Q4_1", 64), ("Q8_0", 64), ("Q5_1", 32), ("Q6_K", 96)],
}


@pytest.mark.parametrize("parts", PARTS)
def test_parts_side_by_side(kernel, open_backend, rng, parts):
    program_of = residual_program(rng, lambda backend, *matrices: backend.linear(matrices))
    check(open_backend, kernel, program_of, random_pairs(rng, *PARTS[parts]), HIDDEN)


def test_codes_beside_floats(kernel, open_backend, rng):
    """A file may hold one part of a linear as floats."""
    program_of = residual_program(rng, lambda backend, *matrices: backend.linear(matrices))
    floats = rng.standard_normal((64, HIDDEN)).astype(np.float32)
    check(open_backend, kernel, program_of, [*random_pairs(rng, ("Q4_K", 192)), (floats, floats)], HIDDEN)


def gated_program(rng):
    """The output of SwiGLU."""
    table = signs(rng, TOKENS, HIDDEN)

    def program_of(gate, up):
        def program(backend):
            packed, pair = backend.table(table), backend.gated_pair(gate, up)
            ones, eye = (
                backend.vector(np.ones(HIDDEN, np.float32)),
                backend.linear([np.eye(up.shape[0], dtype=np.float32)]),
            )
            return lambda ops: ops.sample_head(ops.linear_swiglu(ops.rms_norm(ops.embed(packed), ones, 0.0), pair), eye)

        return program

    return program_of


@pytest.mark.parametrize("outputs", [64, 75])
@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_1"), ("Q6_K", "Q6_K"), ("Q4_K", "Q6_K")], ids=str)
def test_gate_and_up(kernel, open_backend, rng, kinds, outputs):
    """Of one format, which lie as codes, and of two, which do not."""
    check(open_backend, kernel, gated_program(rng), random_pairs(rng, *((k, outputs) for k in kinds)), outputs)


def test_floats_of_any_kind_are_rounded_as_numpy_would():
    """NaN stays NaN, whatever its payload."""
    bits = np.array([0x7FFFE000, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0x3F808000, 0x3F818000, 0x00000001], np.uint32)
    out = np.zeros((1, len(bits)), np.uint16)
    rows_to_bf16(bits.view(np.float32)[None], out)
    rounded = (out.astype(np.uint32) << 16).view(np.float32)[0]
    np.testing.assert_array_equal(rounded, round_bf16(bits.view(np.float32)))


def test_memory_that_is_not_there(monkeypatch):
    """A kernel cache that cannot be read is an OSError, too, and must not be taken for it."""

    def refuse(*arguments, **more):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(MemoryError, match="no room for 40 bytes"):
        aligned_zeros(10, np.float32)
