"""Rows of the label tables that are computed from windows: tokens, and the masks of random subsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from kvlens.records import Tokens
from kvlens.schemas import pack_kept


def mean_over_windows(n_tokens: int, windows: pd.DataFrame) -> Float[np.ndarray, " pos"]:
    """Mean effect in nats over the windows that cover each of `n_tokens` positions; NaN where none does."""
    total, count = np.zeros(n_tokens + 1), np.zeros(n_tokens + 1)
    starts, ends = windows.window_start.to_numpy(), windows.window_end.to_numpy()
    for start, end, effect in zip(starts, ends, windows.effect_nats.to_numpy(), strict=True):
        # Added window by window, not as running differences: a sink's tens of nats would leave rounding behind.
        total[start:end] += effect
        count[start:end] += 1
    with np.errstate(invalid="ignore"):
        return (total / np.where(count > 0, count, np.nan))[:n_tokens]


def token_rows(tokens: Tokens, tokenizer: Any, windows: pd.DataFrame) -> dict[str, Any]:
    """The rows of the table `tokens`: every token of the trace with its effect and whether a window over it flips."""
    flipped: list[bool | None] = [None] * tokens.n_tokens
    for start, end, flip in zip(windows.window_start, windows.window_end, windows.flipped, strict=True):
        if not pd.isna(flip):
            for pos in range(int(start), int(end)):
                flipped[pos] = bool(flip) or bool(flipped[pos])
    return {
        "trace_id": tokens.trace.id,
        "pos": np.arange(tokens.n_tokens, dtype=np.int32),
        "token_id": tokens.ids.astype(np.int32),
        "token": token_texts(tokens, tokenizer),
        "segment": [tokens.segment(pos) for pos in range(tokens.n_tokens)],
        "effect_nats": mean_over_windows(tokens.n_tokens, windows),
        "flipped": flipped,
    }


def token_texts(tokens: Tokens, tokenizer: Any) -> list[str]:
    """The text each token stands for, or its name in the vocabulary when it has none of its own (BOS).

    A character that several tokens share (the bytes of an emoji) is given to the first of them, so that the texts
    in their order are the text.
    """
    found, edge = [], 0
    for token_id, (start, end) in zip(tokens.ids.tolist(), tokens.char_spans.tolist(), strict=True):
        if start < 0:
            found.append(str(tokenizer.convert_ids_to_tokens(token_id)))
            continue
        found.append(tokens.text[max(start, edge) : end])
        edge = max(edge, end)
    return found


def subset_rows(
    trace_id: str, kept: Bool[np.ndarray, "subset pos"], effects: Float[np.ndarray, " subset"]
) -> dict[str, Any]:
    """The rows of the table `subsets`: one keep-mask each with its effect in nats."""
    return {
        "trace_id": trace_id,
        "subset": np.arange(len(kept), dtype=np.int32),
        "kept": [pack_kept(mask) for mask in kept],
        "effect_nats": effects,
    }
