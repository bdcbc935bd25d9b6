"""Which windows does a trace have under a run's settings, and from where on must each be recomputed?

Windows lie in the context and leave out its last token, which no intervention hides. Of fixed width they stand at the
run's stride (from the first token after the prompt where the prompt is left out); units come from the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from kvlens.errors import InputError
from kvlens.probe.occlusion import Intervention, windows_of
from kvlens.probe.settings import Settings
from kvlens.records import Tokens
from kvlens.segmenting import units

Window = tuple[int, int]


def list_windows(tokens: Tokens, settings: Settings) -> list[Window]:
    """All windows of a trace, in order.

    Raises: InputError when there is none.
    """
    start = tokens.n_prompt if settings.skip_prompt else 0
    if settings.units is not None:
        found = [window for window in units(tokens, settings.units) if window[0] >= start]
    else:
        found = windows_of(tokens, settings.window, settings.stride or settings.window, start=start)
    if not found:
        where = "after the prompt in" if settings.skip_prompt else "in"
        raise InputError(
            f"{tokens.trace.id}: no {settings.units or 'window'} to hide {where} its {tokens.n_context} context tokens",
            "give the trace `spans`, or another unit"
            if settings.units == "spans"
            else "give a longer trace or another unit",
        )
    return found


def first_positions(tokens: Tokens, windows: Sequence[Window], how: Intervention) -> list[int]:
    """The first position that each window's counterfactual recomputes, told without building it."""
    last = tokens.n_context - 1
    if how.kind == "substitute":
        return [start for start, _ in windows]
    lag = 0 if how.kind == "knockout" else how.lag
    return [last if lag is None else min(end + lag, last) for _, end in windows]


def windows_in(rows: pd.DataFrame) -> list[Window]:
    """The windows of a table's rows, in their order."""
    return list(zip(rows.window_start.tolist(), rows.window_end.tolist(), strict=True))
