"""Which function does attention call? Names in transformers' table of backends, and what stands behind them.

1. `backend_called`: for a while, a function of ours under a name that no backend has.
2. `own_backend`: what an attention module calls now; `causal_backend`: FlashAttention, where the model uses it.
3. `table_kept`: after a block the table is what it was, whatever a package that was imported there put into it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlens.causal_lm import Model
from kvlens.errors import ModelRefused

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
OVERRIDE_PREFIX = "kvlens-override-"
_override_number = itertools.count()


def unused_backend_name() -> str:
    """A name that no attention backend has; transformers builds no mask for a backend it does not know."""
    return f"{OVERRIDE_PREFIX}{next(_override_number)}"


@contextmanager
def backend_called(name: str, function: AttentionFunction) -> Iterator[None]:
    """Within it attention modules whose config names this backend call `function`."""
    ALL_ATTENTION_FUNCTIONS[name] = function
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


@contextmanager
def table_kept() -> Iterator[None]:
    """A block after which every backend's name stands for the function it stood for before."""
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    try:
        yield
    finally:
        for name in list(ALL_ATTENTION_FUNCTIONS):
            if ALL_ATTENTION_FUNCTIONS[name] is not before.get(name):
                with suppress(KeyError):  # what was set here lies over the library's own, which shows again
                    del ALL_ATTENTION_FUNCTIONS[name]
        for name, function in before.items():
            if name not in ALL_ATTENTION_FUNCTIONS or ALL_ATTENTION_FUNCTIONS[name] is not function:
                ALL_ATTENTION_FUNCTIONS[name] = function


def own_backend(module: Any) -> AttentionFunction:
    """The function that this attention module calls now; raises ModelRefused where kvlens does not find it."""
    name = str(module.config._attn_implementation)
    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    # `eager` is in no table: every family writes its own, under one name
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if name != "eager" or eager is None:
        raise ModelRefused(
            f"{type(module).__name__}: kvlens does not find what its attention backend '{name}' calls",
            "use --attention sdpa",
        )
    return eager


def causal_backend(model: Model) -> Callable[[Tensor, Tensor, Tensor, float], Tensor] | None:
    """FlashAttention's causal attention of (query, keys, values [batch, head, pos, d_head], scale), where in use."""
    if not model.attention.startswith("flash"):
        return None
    backend = ALL_ATTENTION_FUNCTIONS[model.attention]

    def causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        options: dict[str, Any] = {"scaling": scale, "dropout": 0.0, "is_causal": True}
        output, _ = backend(model.layers[0], query, keys, values, None, **options)
        return output.transpose(1, 2)

    return causal
