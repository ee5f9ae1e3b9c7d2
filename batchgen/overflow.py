"""Prompts that are longer than the model's context, cut to fit."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchgen.prompt_sources import Encoded

Overflow = Literal["error", "truncate_left", "truncate_right", "truncate_middle"]


def truncate(
    encoded: Encoded, max_tokens: NDArray[np.int64], context_length: int, overflow: Overflow
) -> tuple[Encoded, NDArray[np.int32]]:
    """The prompts, none longer than the context, and how many tokens each has lost.

    Who is too long keeps so much that `max_tokens` can be generated, but at least half of the context. What is lost is
    the beginning (`truncate_left`), the end (`truncate_right`) or the middle.
    """
    lengths = encoded.lengths.astype(np.int64)
    room = np.maximum(context_length + 1 - max_tokens, context_length // 2 + 1)
    kept = np.where(lengths > context_length, np.minimum(room, context_length), lengths)
    lost = lengths - kept
    if overflow == "error" or not lost.any():
        return encoded, np.zeros(len(lengths), np.int32)
    head = {"truncate_left": np.zeros_like(kept), "truncate_right": kept, "truncate_middle": (kept + 1) // 2}[overflow]
    place = np.arange(len(encoded.tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    stays = (place < np.repeat(head, lengths)) | (place >= np.repeat(head + lost, lengths))
    return Encoded(encoded.tokens[stays], kept.astype(np.int32), encoded.failures), lost.astype(np.int32)
