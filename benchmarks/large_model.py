"""How much memory and time a large quantised model takes: a made-up one with the shape of Mistral 7B in Q4_K.

    python -m benchmarks.large_model [--layers 32] [--rows 8] [--folder DIR] [--most-gb 7]

Its blocks are random, so its answers mean nothing, but it has the size, types and metadata of a real file. It is
written into a temporary folder (4.1 GB with all layers), run by `batchgen run` in a process of its own with
`weights: native`, whose peak of resident memory is measured, and removed. Exit code 1 if that is above `--most-gb`.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import polars as pl

from batchgen.text.pieces import byte_alphabet
from batchgen.yaml_text import write_yaml

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 4096, 14336, 32, 8, 32000
KIND = gguf.GGMLQuantizationType.Q4_K
BLOCK_WEIGHTS, BLOCK_BYTES = gguf.GGML_QUANT_SIZES[KIND]
PROMPT_TOKENS, NEW_TOKENS = 64, 16


def tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    kv = HIDDEN // HEADS * KV_HEADS
    yield "token_embd.weight", (VOCAB, HIDDEN)
    yield "output_norm.weight", (HIDDEN,)
    yield "output.weight", (VOCAB, HIDDEN)
    for i in range(layers):
        yield from ((f"blk.{i}.{name}.weight", (HIDDEN,)) for name in ("attn_norm", "ffn_norm"))
        yield from ((f"blk.{i}.{name}.weight", (HIDDEN, HIDDEN)) for name in ("attn_q", "attn_output"))
        yield from ((f"blk.{i}.{name}.weight", (kv, HIDDEN)) for name in ("attn_k", "attn_v"))
        yield from ((f"blk.{i}.{name}.weight", (FFN, HIDDEN)) for name in ("ffn_gate", "ffn_up"))
        yield f"blk.{i}.ffn_down.weight", (HIDDEN, FFN)


def write_model(path: Path, layers: int) -> None:
    """One tensor in memory at a time."""
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    _add_metadata(writer, layers)
    for name, shape in tensors(layers):
        if len(shape) == 1:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
        else:
            stored = (shape[0], shape[1] // BLOCK_WEIGHTS * BLOCK_BYTES)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), stored[0] * stored[1], raw_dtype=KIND)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, shape in tensors(layers):
        writer.write_tensor_data(np.ones(shape, np.float32) if len(shape) == 1 else _blocks(rng, *shape))
    writer.close()


def _blocks(rng: np.random.Generator, outputs: int, inputs: int) -> np.ndarray:
    """Random codes whose weights have a mean of zero and a deviation of 1/64."""
    count = outputs * inputs // BLOCK_WEIGHTS
    blocks = np.frombuffer(rng.bytes(count * BLOCK_BYTES), np.uint8).reshape(count, BLOCK_BYTES).copy()
    blocks[:, :4] = np.array([8e-5, 6e-4], np.float16).view(np.uint8)
    return blocks.reshape(outputs, -1)


def _add_metadata(writer: gguf.GGUFWriter, layers: int) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = [*byte_alphabet(), "ab", "</s>"]
    tokens += [f"<{i}>" for i in range(len(tokens), VOCAB)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(tokens.index("</s>"))


def run(folder: Path, model: Path, rows: int) -> dict[str, Any]:
    """Figures of a job: gigabytes, seconds, tokens per second of generating (prompts and answers)."""
    prompts = np.random.default_rng(1).integers(0, 256, (rows, PROMPT_TOKENS)).tolist()
    pl.DataFrame({"ids": prompts}, schema={"ids": pl.List(pl.Int32)}).write_parquet(folder / "rows.parquet")
    spec = {
        "model": {"source": str(model), "weights": "native"},
        "input": {"path": "rows.parquet", "token_ids": "ids"},
        "sampling": {"max_tokens": NEW_TOKENS, "ignore_eos": True},
        "output": {"path": str(folder / "out")},
        "engine": {"kv_memory": "256MiB", "kernel": "auto"},
    }
    (folder / "job.yaml").write_text(write_yaml(spec), encoding="utf-8")
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "batchgen", "run", str(folder / "job.yaml"), "--quiet"], check=True)
    record = json.loads((folder / "out" / "job.json").read_text())
    totals = record["totals"]
    return {
        "kernel": record["identity"]["kernel"],
        "file, GB": model.stat().st_size / 1e9,
        "peak of memory, GB": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9,
        "seconds in all": time.perf_counter() - begun,
        **{f"{name} seconds": totals[f"{name}_seconds"] for name in ("load", "compile", "generate")},
        "prompt tokens": totals["computed_prompt_tokens"],
        "new tokens": totals["generated_tokens"],
        **_step_figures(folder),
    }


def _step_figures(folder: Path) -> dict[str, float]:
    steps = pl.read_parquet(folder / "out" / "steps" / "*.parquet")
    decode = steps.filter((pl.col("num_prefill_tokens") == 0) & (pl.col("num_decode_tokens") > 0))
    return {
        "median decode step, s": decode["duration_ns"].median() / 1e9,
        "sequences of a step": decode["num_decode_tokens"].median(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=None, help="where the temporary folder is made")
    parser.add_argument("--most-gb", type=float, default=7.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        begun = time.perf_counter()
        write_model(model := Path(name) / "model.gguf", options.layers)
        print(f"written in {time.perf_counter() - begun:.1f} s", file=sys.stderr)
        figures = run(Path(name), model, options.rows)
    for key, value in figures.items():
        print(f"{key:24} {value:.3f}" if isinstance(value, float) else f"{key:24} {value}")
    sys.exit(figures["peak of memory, GB"] > options.most_gb)


if __name__ == "__main__":
    main()
