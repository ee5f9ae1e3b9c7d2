"""Records that Python fills and kernels read: the operations of a program, what a model is like, a step's counts."""

import numpy as np

EMBED, NORM, LINEAR, LINEAR_ADD, LINEAR_SWIGLU, ROPE, CLEAR, ATTENTION, HEAD, PICK, SAMPLE, ROWS, WHOLE = range(13)

FORMAT_PANELS, FORMAT_CODES, FORMAT_INT8 = range(3)
"""Panels that a kernel multiplies as they lie; codes that are expanded to such; integers (see gemm.py)."""

OP_DTYPE = np.dtype(
    [
        ("code", np.int64),
        ("logits_rows", np.int64),  # 1: over the rows that want logits; 0: over the step's tokens
        ("x", np.int64),  # address of the left operand
        ("w", np.int64),  # address of the weight
        ("scales", np.int64),  # address of the scales of its columns, of int8
        ("format", np.int64),  # FORMAT_* of the weight
        ("pair_bytes", np.int64),  # of two panels of the weight
        ("bits", np.int64),  # of a code, of FORMAT_CODES
        ("group", np.int64),  # consecutive inputs that share a scale, of FORMAT_CODES
        ("minima", np.int64),  # whether scales are followed by minima, of FORMAT_CODES
        ("out", np.int64),  # address of the result
        ("k", np.int64),  # columns of x
        ("n", np.int64),  # columns of the result
        ("ld", np.int64),  # floats from one row of the float32 operand or result to the next
        ("layer", np.int64),
        ("fused_end", np.int64),  # end of the operations from this one on that look at one row at a time
        ("eps", np.float64),
        ("function", np.int64),  # address of a kernel of on_demand.py, where the operation is or has one
        ("bias", np.int64),  # address of what is added to every row
        ("width", np.int64),  # columns of a group, of those that are normalised apart
        ("kind", np.int64),  # ACTIVATION_*, or whether a norm is centred
        ("rope", np.int64),  # bytes from the first table of cosines, or sines, to the layer's own
        ("window", np.int64),  # keys that a query sees, itself included; 0: all
        ("soft_cap", np.float64),  # limit of scores or logits, 0: none
        ("experts", np.int64),  # address of `OP_DTYPE` records, one per expert
        ("expert_count", np.int64),
        ("chosen", np.int64),  # experts of a token
        ("routes", np.int64),  # address of int32, see experts.py
    ],
    align=True,
)

MODEL_DTYPE = np.dtype(
    [
        ("threads", np.int64),
        ("kernel", np.int64),  # gemm.KERNEL_*
        ("act_bf16", np.int64),
        ("table_bf16", np.int64),
        ("kv_type", np.int64),  # kv_cache.KV_*
        ("kv_groups", np.int64),  # scales of a head's keys or values, of int8
        ("kv_amx", np.int64),
        ("layers", np.int64),
        ("heads", np.int64),
        ("kv_heads", np.int64),
        ("group", np.int64),
        ("head_dim", np.int64),
        ("dim", np.int64),  # head_dim padded to 32
        ("vocab", np.int64),
        ("page_size", np.int64),
        ("pages", np.int64),
        ("max_tokens", np.int64),
        ("state_items", np.int64),
        ("q_scale", np.float64),
        ("kv", np.int64),  # addresses from here on
        ("q", np.int64),
        ("state", np.int64),
        ("cos", np.int64),
        ("sin", np.int64),
        ("partial", np.int64),
        ("logits", np.int64),
        ("counters", np.int64),
        ("barrier", np.int64),
        ("tile_config", np.int64),
        ("scratch", np.int64),
        ("panels_offset", np.int64),  # bytes into a thread's scratch: a pair of expanded panels
        ("integers_offset", np.int64),  # rows in int8
        ("head_offset", np.int64),  # and blocks of logits
        ("scratch_bytes", np.int64),
    ],
    align=True,
)

STEP_DTYPE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "tokens", "rows", "samples", "copies", "cleared", "shared_items", "items", "chunk",
            "sequences", "window_shared", "window_items",  # of the list for layers with a window, after the other one
            "positions", "logits_rows", "block_tables", "table_columns", "work",  # addresses, but for the columns
        )
    ],
    align=True,
)  # fmt: skip

ACTIVATIONS = "silu", "gelu", "gelu_tanh"
ACTIVATION_SILU, ACTIVATION_GELU, ACTIVATION_GELU_TANH = range(3)

HEAD_PAIRS = 8
"""Pairs of weight panels of the output head per work item."""
PARTIAL_FIELDS = 4
"""Floats that a group of the head's columns leaves of a row."""
