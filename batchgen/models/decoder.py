"""The decoder, written once in the operations of a backend."""

from batchgen.kernels.base import Ops
from batchgen.models.config import ModelConfig
from batchgen.models.weights import DecoderWeights


def forward(ops: Ops, config: ModelConfig, weights: DecoderWeights) -> None:
    """Llama (Touvron et al. 2023): pre-norm blocks of grouped-query attention and SwiGLU, then the output head."""
    eps = config.rms_norm_eps
    x = ops.embed(weights.embedding)
    for number, layer in enumerate(weights.layers):
        qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, eps), layer.qkv)
        attended = ops.attention(ops.rope_and_cache(qkv, number), number)
        x = ops.linear_add(attended, layer.attention_output, x)
        gated = ops.linear_swiglu(ops.rms_norm(x, layer.ffn_norm, eps), layer.gate_up)
        x = ops.linear_add(gated, layer.down, x)
    ops.sample_head(ops.final_norm(x, weights.output_norm, eps), weights.output)
