"""Run by a Python that has torch and transformers: `tiny_llama.py FOLDER [SETTING=JSON ...]` saves a random llama in
FOLDER, and what it makes of some tokens in `logits.npy`."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main(folder: Path, **settings: object) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes = {**shape, "num_key_value_heads": 2, "vocab_size": 264, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, "initializer_range": 0.2, **settings}))
    model.save_pretrained(folder, max_shard_size="100KB")
    with torch.no_grad():
        logits = model(torch.arange(4, 40)[None]).logits[0]
    np.save(folder / "logits.npy", logits.numpy())


if __name__ == "__main__":
    pairs = (text.split("=", 1) for text in sys.argv[2:])
    main(Path(sys.argv[1]), **{key: json.loads(value) for key, value in pairs})
