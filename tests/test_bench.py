"""`batchgen bench`: its arithmetic with made-up numbers, and one short run on the real model."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from batchgen import bench, cli, machine
from batchgen.errors import SpecError
from batchgen.kernels.base import ModelShape
from batchgen.kernels.cpu import records
from batchgen.machine import Limits
from batchgen.progress import SilentProgress
from batchgen.spec import EngineSpec, ModelSpec, model_job

MODEL = ModelShape(64, 96, 2, 4, 2, 16, 320, 512)
LIMITS = Limits(2, 10e9, {"tdpbf16ps": 1e12, "tdpbssd": 2e12})
PREFILL = bench.StepShape("prefill", 2, 3, 5)


def op(code: int, **fields: int) -> np.void:
    record = np.zeros(1, records.OP_DTYPE)
    record["code"] = code
    for name, value in fields.items():
        record[name] = value
    return record[0]


def test_shapes_keep_within_the_limits() -> None:
    def shapes(tokens: int, sequences: int, context: int = 8192) -> list[tuple[int, int, int]]:
        engine = EngineSpec(max_batch_tokens=tokens, max_num_seqs=sequences)
        return [(s.sequences, s.tokens, s.context) for s in bench.step_shapes(engine, context)]

    long = [(1, 2048, 0), (16, 1, 1024)]
    assert shapes(2048, 256) == [(16, 128, 0), (128, 1, 128), (1, 1, 128), *long]
    assert shapes(2048, 8) == [(8, 128, 0), (8, 1, 128), (1, 1, 128), (1, 2048, 0), (8, 1, 1024)]
    assert shapes(48, 256) == [(1, 48, 0), (48, 1, 48), (1, 1, 48), (1, 48, 0), (16, 1, 24)]
    assert shapes(2048, 256, 64) == [(64, 32, 0), (128, 1, 32), (1, 1, 32), (1, 32, 0), (16, 1, 16)]


def test_shapes_tell_the_speed_of_the_machine() -> None:
    shapes = {bench.StepShape("prefill", 2, 3, 0): 0.5, bench.StepShape("decode", 6, 1, 8): 0.25}
    known = bench.measured_steps([bench.StepFigure(shape, s, 0.0, 0.0, 0.0, []) for shape, s in shapes.items()])
    assert (known.steps, known.seconds) == (20, 7.5)
    assert known.terms.tolist() == [20, 60, 60, 10 * 2 * (1 + 2 + 3), 10 * 6 * 9]


def test_batch_gives_each_sequence_pages_of_its_own() -> None:
    batch = bench.step_batch(replace(PREFILL, context=30), 32, 320)
    assert batch.block_tables.tolist() == [[0, 1], [2, 3]]
    assert batch.positions.tolist() == [30, 31, 32] * 2
    assert batch.slot_mapping.tolist() == [30, 31, 32, 94, 95, 96]
    assert batch.seq_lens.tolist() == [33, 33]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 6]
    assert batch.logits_rows.tolist() == [2, 5]


def test_least_work_of_each_kind() -> None:
    work = bench.step_work(PREFILL, MODEL, kv_bytes=128, table_bytes=2)
    assert (work.tokens, work.rows, work.keys) == (6, 2, 16)
    assert work.pairs == 2 * (6 + 7 + 8)
    weight = {"k": 64, "n": 96, "pair_bytes": 64 * 32 * 2}
    expected = [
        (op(records.EMBED, k=64), (6 * 64 * 2, 0)),
        (op(records.NORM, n=64), (256, 0)),
        (op(records.LINEAR, **weight), (64 * 96 * 2, 2 * 6 * 64 * 96)),
        (op(records.LINEAR_SWIGLU, **weight), (64 * 192 * 2, 2 * 6 * 64 * 192)),
        (op(records.LINEAR_ADD, **weight, scales=1), (64 * 96 * 2 + 96 * 4, 2 * 6 * 64 * 96)),
        (op(records.HEAD, **weight, logits_rows=1), (64 * 96 * 2, 2 * 2 * 64 * 96)),
        (op(records.ROPE), (6 * 128, 0)),
        (op(records.ATTENTION), (16 * 128, 4 * 42 * 64)),
        (op(records.PICK), (0, 0)),
    ]
    for item, least in expected:
        assert bench.least_work(item, work) == least


def test_figures_of_a_step() -> None:
    """Two linears of 12,288 bytes and 73,728 operations in 1 and 3 microseconds; a tenth of the time is neither."""
    weight = {"k": 64, "n": 96, "pair_bytes": 64 * 32 * 2}
    ops = np.array([op(records.CLEAR), op(records.LINEAR, **weight), op(records.LINEAR, **weight)])
    times = np.array([[[1, 0], [1000, 0], [4000, 4000]], [[1, 0], [1000, 0], [2000, 6000]]], np.int64)
    work = bench.step_work(PREFILL, MODEL, 128, 2)
    step = bench.step_figure(PREFILL, 10e-6, ops, times, work, LIMITS)
    assert step.tokens_per_s == pytest.approx(6e5)
    assert step.waiting == pytest.approx(0.5)
    assert step.outside == pytest.approx(0.1, abs=0.001)
    (linear,) = step.kernels
    assert (linear.kernel, linear.bytes, linear.operations) == ("linear", 24576, 147456)
    assert linear.seconds == pytest.approx(4e-6)
    assert linear.bytes_per_s == pytest.approx(24576 / 4e-6)
    assert (linear.limit, linear.of_limit) == ("memory", pytest.approx(24576 / 10e9 / 4e-6))


def test_int8_weights_have_a_limit_of_their_own() -> None:
    integers, floats = op(records.LINEAR, format=records.FORMAT_INT8), op(records.ATTENTION)
    assert bench.multiply_limit(integers, LIMITS) == 2e12
    assert bench.multiply_limit(floats, LIMITS) == 1e12
    assert bench.multiply_limit(integers, Limits(1, 1.0, {"fma": 3e11})) == 3e11


def test_units_of_the_kernels() -> None:
    assert machine.units("portable", "int8") == ("fma",)
    assert machine.units("amx_bf16", "native") == ("tdpbf16ps",)
    assert machine.units("amx_bf16", "int8") == ("tdpbf16ps", "tdpbssd")


def test_limits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 24)
    limits = machine.measure_limits("portable", "fp32", 2)
    assert limits.bytes_per_s > 1e8
    assert limits.operations_per_s["fma"] > 1e9


def test_the_reference_kernel_is_refused() -> None:
    with pytest.raises(SpecError, match="keeps no times"):
        bench.run_bench(ModelSpec(source="none"), EngineSpec(kernel="reference"), SilentProgress())


def test_settings_without_a_spec() -> None:
    job = model_job("hf:a/b/c.gguf", ["engine.threads=1", "model.weights=int8"])
    assert (job.model.source, job.model.weights, job.engine.threads) == ("hf:a/b/c.gguf", "int8", 1)
    with pytest.raises(SpecError, match=r"--set engine\.thread=1"):
        model_job("m.gguf", ["engine.thread=1"])


def test_on_the_real_model(model_path, monkeypatch: pytest.MonkeyPatch, own_calibration: Path) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 24)
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    monkeypatch.setattr(bench, "LEAST_STEPS", 1)
    arguments = ["bench", str(model_path), "--set", "engine.max_batch_tokens=64", "--set", "engine.max_num_seqs=4"]
    result = json.loads(CliRunner().invoke(cli.app, [*arguments, "--json"]).stdout)
    assert [step["shape"]["name"] for step in result["steps"]] == [
        "prefill",
        "decode",
        "single",
        "long prompt",
        "long context",
    ]
    assert list(own_calibration.glob("*.json"))  # later plans know the machine
    for step in result["steps"]:
        kernels = {row["kernel"]: row for row in step["kernels"]}
        assert {"embed", "norm", "linear", "linear_add", "linear_swiglu", "rope", "attention", "head"} <= set(kernels)
        assert all(row["seconds"] > 0 for row in step["kernels"])
        assert 0 <= step["waiting"] < 1
    text = CliRunner().invoke(cli.app, arguments).stdout
    assert "single: 1 x 1 tokens after 64" in text
    assert "linear_swiglu" in text
