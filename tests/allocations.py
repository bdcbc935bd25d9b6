"""How much memory do tensors take while something runs?"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most that tensors took at any moment of the run, beside what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda event: event.start_ns())))
