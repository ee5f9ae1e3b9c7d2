"""Kernels that only some models need, each against its numpy twin: norms, biases, activations, positions, caps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from batchgen.kernels.base import Backend
from batchgen.kernels.reference import gelu, gelu_tanh
from tests.kernels.kernel_programs import build, every_token, logits_of, relative_error, same_bits

HIDDEN, WIDE, TOKENS = 80, 112, 64
RNG = np.random.default_rng(5)
TABLE = (RNG.standard_normal((TOKENS, HIDDEN)) + 0.5).astype(np.float32)
POSITIONS = RNG.standard_normal((512, HIDDEN)).astype(np.float32)
WEIGHT, BIAS = (RNG.standard_normal(HIDDEN).astype(np.float32) for _ in range(2))
WIDE_BIAS, WIDE_WEIGHT = (RNG.standard_normal(WIDE).astype(np.float32) for _ in range(2))
UP = (RNG.standard_normal((2 * WIDE, HIDDEN)) / 9).astype(np.float32)
DOWN = (RNG.standard_normal((HIDDEN, WIDE)) / 10).astype(np.float32)

Steps = Callable[[Any, "Packed", Any], Any]
"""Of (ops, weights, residual stream): what the identity makes logits of."""


class Packed:
    """Weights as a backend holds them, packed when they are asked for."""

    def __init__(self, backend: Backend):
        self.vector, self.linear, self.table = backend.vector, backend.linear, backend.table
        self.ones = backend.vector(np.ones(HIDDEN, np.float32))
        self.up, self.both, self.down = (backend.linear([w]) for w in (UP[:WIDE], UP, DOWN))

    def result(self, ops: Any, x: Any) -> Any:
        """float32 results of a linear, WIDE columns."""
        return ops.linear(ops.rms_norm(x, self.ones, 1e-5), self.up)

    def shown(self, ops: Any, results: Any, x: Any) -> Any:
        """Results as the residual stream holds them, so that nothing is rounded before it is looked at."""
        return ops.operand(ops.linear_add(ops.activate(results, WIDE, "silu", False), self.down, x))


PROGRAMS: dict[str, Steps] = {
    "layer norm": lambda ops, w, x: ops.layer_norm(x, w.vector(WEIGHT), w.vector(BIAS), 1e-5),
    "layer norm without bias": lambda ops, w, x: ops.layer_norm(x, w.vector(WEIGHT), None, 1e-5),
    "last layer norm": lambda ops, w, x: ops.layer_norm(x, w.vector(WEIGHT), w.vector(BIAS), 1e-5, final=True),
    "operand": lambda ops, w, x: ops.operand(x),
    "two norms": lambda ops, w, x: (
        ops.rms_norm(x, w.ones, 1e-5),
        ops.layer_norm(x, w.vector(WEIGHT), None, 1e-5, kept=True),
    )[0],
    "the kept norm": lambda ops, w, x: (
        ops.layer_norm(x, w.vector(WEIGHT), None, 1e-5, kept=True),
        ops.rms_norm(x, w.ones, 1e-5),
    )[0],
    "bias": lambda ops, w, x: w.shown(ops, ops.add_bias(w.result(ops, x), w.vector(WIDE_BIAS)), x),
    "bias of the stream": lambda ops, w, x: ops.operand(ops.add_bias(x, w.vector(BIAS))),
    "columns": lambda ops, w, x: w.shown(
        ops, ops.norm_columns(w.result(ops, x), 16, 2, w.vector(WIDE_WEIGHT[:32]), 1e-5, False), x
    ),
    "one group of columns": lambda ops, w, x: w.shown(
        ops, ops.norm_columns(w.result(ops, x), 0, 1, w.vector(WIDE_WEIGHT), 1e-5, False), x
    ),
    "centred columns": lambda ops, w, x: w.shown(
        ops, ops.norm_columns(w.result(ops, x), 0, 7, w.vector(WIDE_WEIGHT), 1e-5, True), x
    ),
    "add normed": lambda ops, w, x: ops.operand(
        ops.add_normed(
            ops.linear(ops.activate(w.result(ops, x), WIDE, "silu", False), w.down), w.vector(WEIGHT), 1e-6, x
        )
    ),
    "positions": lambda ops, w, x: ops.operand(ops.add_positions(x, w.table(POSITIONS))),
}
for _kind in ("silu", "gelu", "gelu_tanh"):
    PROGRAMS[_kind] = lambda ops, w, x, kind=_kind: ops.activate(w.result(ops, x), WIDE, kind, False)
    PROGRAMS[f"gated {_kind}"] = lambda ops, w, x, kind=_kind: ops.activate(
        ops.linear(ops.rms_norm(x, w.ones, 1e-5), w.both), WIDE, kind, True
    )


def program(name: str) -> Callable[[Backend], Callable[[Any], None]]:
    def load(backend: Backend) -> Callable[[Any], None]:
        packed, table = Packed(backend), backend.table(TABLE)
        columns = WIDE if "gelu" in name or "silu" in name else HIDDEN
        eye = backend.linear([np.eye(WIDE, columns, dtype=np.float32)])
        return lambda ops: ops.sample_head(PROGRAMS[name](ops, packed, ops.embed(table)), eye)

    return load


def open_program(backend: Backend, name: str) -> Backend:
    return build(backend, program(name), HIDDEN, WIDE)


@pytest.mark.parametrize("name", PROGRAMS)
def test_against_the_twin(weight_variant, open_backend, name):
    """Also with more rows than a thread takes through several operations at a time."""
    backend, twin = open_backend(*weight_variant.names, threads=2), weight_variant.reference()
    backend, twin = open_program(backend, name), open_program(twin, name)
    tolerance = 4e-2 if weight_variant.weights == "int8" else 1.5e-2 if weight_variant.rounds_activations else 3e-6
    for count in (3, 300):
        batch = every_token(np.random.default_rng(count).integers(0, TOKENS, count))
        assert relative_error(logits_of(backend, batch), logits_of(twin, batch)) < tolerance, count


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_row_s_bits_do_not_depend_on_the_others(gemm_variant, open_backend, name):
    backend = open_program(open_backend(*gemm_variant.names), name)
    ids = np.random.default_rng(1).integers(0, TOKENS, 300)
    whole = logits_of(backend, every_token(ids))
    for rows in (1, 5, 33):
        assert same_bits(logits_of(backend, every_token(ids[:rows])), whole[:rows]), rows


def test_twins_of_gelu_agree_where_they_must():
    x = np.linspace(-8, 8, 1001).astype(np.float32)
    np.testing.assert_allclose(gelu(x), gelu_tanh(x), atol=5e-4)
    assert gelu(np.array([1], np.float32))[0] == pytest.approx(0.8413447, abs=1e-6)


@pytest.mark.parametrize("cap", [2.0, 30.0])
def test_capped_logits(gemm_variant, open_backend, cap):
    """The log-probabilities are those of the capped logits, too."""
    weight = (RNG.standard_normal((77, HIDDEN)) / 3).astype(np.float32)

    def load(backend):
        table, norm, head = backend.table(TABLE), backend.vector(WEIGHT), backend.linear([weight])
        return lambda ops: ops.sample_head(ops.final_norm(ops.embed(table), norm, 1e-5), head, cap)

    backend, twin = (build(b, load, HIDDEN, 77) for b in (open_backend(*gemm_variant.names), gemm_variant.reference()))
    got, expected = (b.run(every_token(range(40))) for b in (backend, twin))
    assert np.abs(got.logits[:40]).max() <= cap
    tolerance = 2e-2 if gemm_variant.rounds_activations else 1e-5
    assert relative_error(got.logits[:40], expected.logits) < tolerance
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=tolerance * cap)
