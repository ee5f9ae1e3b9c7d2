"""The decoder, written once in the operations of a backend, of the blocks that an architecture is composed of."""

from typing import Any

from batchgen.kernels.base import Ops
from batchgen.models.config import ModelConfig
from batchgen.models.handles import DecoderWeights, ExpertWeights, LayerWeights, Linear, Norm


def forward(ops: Ops, config: ModelConfig, weights: DecoderWeights) -> None:
    """Blocks of attention and a feed-forward part, one after the other or side by side, then the output head.

    Of Llama (Touvron et al. 2023): pre-norm blocks of grouped-query attention and SwiGLU.
    """
    x = layers(ops, config, weights)
    ops.sample_head(last_norm(ops, config, weights.output_norm, x), weights.output, config.logit_cap)


def forward_hidden(ops: Ops, config: ModelConfig, weights: DecoderWeights) -> None:
    """The same without the head: what is wanted are the final hidden states, after the norm."""
    norm, centred = weights.output_norm, config.architecture.norm == "layer"
    ops.hidden_states(layers(ops, config, weights), norm.weight, norm.bias, config.norm_eps, centred)


def layers(ops: Ops, config: ModelConfig, weights: DecoderWeights) -> Any:
    """What the layers leave of each token."""
    x = ops.embed(weights.embedding)
    if weights.positions is not None:
        x = ops.add_positions(x, weights.positions)
    for number, layer in enumerate(weights.layers):
        h = normed(ops, config, layer.attention_norm, x)
        # Side by side, both look at what came before them.
        beside = normed(ops, config, layer.ffn_norm, x, kept=True) if config.parallel and layer.ffn_norm else h
        x = attend(ops, config, layer, number, h, x)
        x = feed(ops, config, layer, beside if config.parallel else normed(ops, config, layer.ffn_norm, x), x)
    return x


def normed(ops: Ops, config: ModelConfig, norm: Norm | None, x: Any, kept: bool = False) -> Any:
    """Without a norm, the stream itself."""
    if norm is None:
        return ops.operand(x)
    if config.architecture.norm == "rms":
        return ops.rms_norm(x, norm.weight, config.norm_eps, kept)
    return ops.layer_norm(x, norm.weight, norm.bias, config.norm_eps, kept)


def last_norm(ops: Ops, config: ModelConfig, norm: Norm, x: Any) -> Any:
    if config.architecture.norm == "rms":
        return ops.final_norm(x, norm.weight, config.norm_eps)
    return ops.layer_norm(x, norm.weight, norm.bias, config.norm_eps, final=True)


def attend(ops: Ops, config: ModelConfig, layer: LayerWeights, number: int, h: Any, x: Any) -> Any:
    """x + attention(h)."""
    kind, centred = config.layer(number), config.architecture.norm == "layer"
    qkv = multiplied(ops, h, layer.qkv)
    for part in layer.column_norms:
        qkv = ops.norm_columns(qkv, part.first, part.groups, part.weight, config.norm_eps, centred)
    attended = ops.attention(ops.rope_and_cache(qkv, number, kind.rope), number, kind.window, config.attention_cap)
    return added(ops, config, attended, layer.attention_output, layer.attention_post_norm, x)


def feed(ops: Ops, config: ModelConfig, layer: LayerWeights, h: Any, x: Any) -> Any:
    """x + the feed-forward part, or the chosen experts, of h."""
    part = layer.feed
    if isinstance(part, ExpertWeights):
        return ops.add_experts(h, ops.linear(h, part.router), part.gate_up, part.down, *routing_of(config), x)
    if part.up is None:
        hidden = ops.linear_swiglu(h, part.swiglu)
    else:
        size, gated = config.shape.intermediate_size, config.architecture.gated
        hidden = ops.activate(multiplied(ops, h, part.up), size, config.activation, gated)
    return added(ops, config, hidden, part.down, layer.ffn_post_norm, x)


def routing_of(config: ModelConfig) -> tuple[int, bool]:
    """Experts of a token, and whether their shares sum to 1."""
    assert config.experts is not None
    return config.experts.chosen, config.experts.normalised


def multiplied(ops: Ops, x: Any, linear: Linear) -> Any:
    result = ops.linear(x, linear.weight)
    return result if linear.bias is None else ops.add_bias(result, linear.bias)


def added(ops: Ops, config: ModelConfig, x: Any, linear: Linear, norm: Norm | None, residual: Any) -> Any:
    """residual + linear(x), normalised before it is added where there is a norm."""
    if norm is not None:
        return ops.add_normed(multiplied(ops, x, linear), norm.weight, config.norm_eps, residual)
    residual = ops.linear_add(x, linear.weight, residual)
    return residual if linear.bias is None else ops.add_bias(residual, linear.bias)
