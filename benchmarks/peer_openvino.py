"""OpenVINO GenAI's continuous batching on one token table; one JSON line.

    python benchmarks/peer_openvino.py TABLE MODEL.gguf [--rows N] [--warm] [--no-sharing] [--cache-gb 4]

Stands alone: it runs in a virtual environment of its own (`pip install openvino-genai gguf polars numpy`).
With `--warm` the first row runs alone before the rest, inside the measured time: the prefix cache gives nothing to
rows that arrive together. Greedy, the end of sequence ignored.
"""

import argparse
import json
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
import polars as pl


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table")
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=None, help="only the first rows of the table")
    parser.add_argument("--warm", action="store_true", help="send the first row ahead")
    parser.add_argument("--no-sharing", action="store_true", help="without the prefix cache")
    parser.add_argument("--cache-gb", type=int, default=4)
    return parser.parse_args()


def load(model: str, cache_gb: int, sharing: bool) -> Any:
    """A pipeline with the settings that gave this peer its best figures."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = cache_gb
    scheduler.max_num_seqs = 256
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = sharing
    return genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {})


def generate(pipeline: Any, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    config = genai.GenerationConfig()
    config.max_new_tokens = max_new_tokens
    config.do_sample = False
    config.ignore_eos = True
    inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
    results = pipeline.generate(inputs, [config] * len(inputs)) if inputs else []
    return [list(result.m_generation_ids[0]) for result in results]


def main() -> None:
    args = arguments()
    frame = pl.read_parquet(args.table)
    prompts = frame["prompt_token_ids"].head(args.rows).to_list() if args.rows else frame["prompt_token_ids"].to_list()
    max_new_tokens, ahead = int(frame["max_new_tokens"][0]), int(args.warm)
    started = time.perf_counter()
    pipeline = load(args.model, args.cache_gb, not args.no_sharing)
    loaded = time.perf_counter()
    generate(pipeline, [[5, 6, 7]], 2)  # what is compiled or allocated on first use counts as load
    start = time.perf_counter()
    answers = generate(pipeline, prompts[:ahead], max_new_tokens)
    answers += generate(pipeline, prompts[ahead:], max_new_tokens)
    seconds = time.perf_counter() - start
    report = {
        "system": "openvino-warm" if args.warm else "openvino",
        "version": genai.__version__,
        "kernel": "openvino",
        "rows": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "generated_tokens": sum(map(len, answers)),
        "seconds": seconds,
        "load_seconds": loaded - started,
        "compile_seconds": start - loaded,
        "first_tokens": [answer[0] for answer in answers],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
