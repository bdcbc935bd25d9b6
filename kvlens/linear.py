"""Which kernel multiplies matrices in the label engine?

PyTorch hands float32 linear layers on x86 to MKL, which is far slower on CPUs that are not Intel's than the oneDNN
kernels in the same PyTorch. So, on such a CPU and without gradients:

1. `fast_linear` is a context in which `torch.nn.functional.linear` goes to oneDNN;
2. everywhere else (Intel, GPUs, half precision, gradients) it changes nothing;
3. inside `default_linear` it changes nothing either: that is how the noise floor gets a second opinion.

The choice depends on the CPU's maker alone, never on a timing, so that a continued run uses the same kernel.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@cache
def kernel() -> str:
    """The kernel of float32 linear layers on this CPU: "oneDNN" or PyTorch's "default"."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return "default"
    facts = Path("/proc/cpuinfo")
    known = facts.is_file() and "GenuineIntel" not in facts.read_text(errors="replace")
    return "oneDNN" if known and hasattr(torch.ops.mkldnn, "_linear_pointwise") else "default"


_ALLOWED = ContextVar("kvlens_fast_linear", default=True)


def fast_linear() -> AbstractContextManager[Any]:
    """A context in which float32 linear layers on the CPU use the faster kernel, where there is one."""
    return _OneDnnLinear() if _ALLOWED.get() and kernel() == "oneDNN" else nullcontext()


@contextmanager
def default_linear() -> Iterator[None]:
    """A context in which `fast_linear` leaves PyTorch's own choice of a kernel alone."""
    before = _ALLOWED.set(False)
    try:
        yield
    finally:
        _ALLOWED.reset(before)


class _OneDnnLinear(TorchFunctionMode):
    """Sends what oneDNN can do to it, and everything else where it would have gone."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.nn.functional.linear and not kwargs and not torch.is_grad_enabled():
            states, weight, bias = (*args, None)[:3]
            if states.dtype == weight.dtype == torch.float32 and states.device.type == weight.device.type == "cpu":
                return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
        return func(*args, **(kwargs or {}))
