"""What audits are tried on: a tiny model, texts of a hundred tokens and more, and methods that cheat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlens.auditing.methods import Full, Held
from kvlens.model import Model
from kvlens.records import Question, Trace

WORDS = "The red box is under the table and the blue one is on the shelf near the door. "
TEXT = Trace("text", text="".join(f"{n}. {WORDS}" for n in range(3)))
PROMPT = Trace("prompt", prompt=2 * WORDS + "Where is the box?", reasoning=" Look. ", target="Under the table.")
ASKED = Trace("asked", prompt=2 * WORDS, target="x", questions=(Question(" Where?", " Under the table."),))


@dataclass(frozen=True)
class Cheat:
    """Keeps everything, hides half of it, and claims half."""

    name: str = "cheat"
    source: str = "policy"
    storage: str = "as shipped"

    @contextmanager
    def compressed(self, model: Model, ids: Tensor) -> Iterator[Held]:
        with Full().compressed(model, ids) as held:
            yield Held(held.keys_values, (), held.claimed_bytes // 2, 0, held.kept_tokens // 2, held.predict)


@dataclass(frozen=True)
class Hoarder(Cheat):
    """Keeps half as keys and values, and the other half where it hopes that nobody looks."""

    name: str = "hoarder"

    @contextmanager
    def compressed(self, model: Model, ids: Tensor) -> Iterator[Held]:
        with Full().compressed(model, ids) as held:
            kept = [part[:, :, ::2].clone() for part in held.keys_values]
            rest = [part[:, :, 1::2].clone() for part in held.keys_values]
            yield Held(kept, rest, held.claimed_bytes // 2 + 200, 0, held.kept_tokens // 2, held.predict)


def seen_and_new(model: Model, n_seen: int = 60, n_new: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random tokens to compress, and those that follow."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.d_vocab, (1, n_seen + n_new), generator=draw)
    return ids[:, :n_seen], ids[:, n_seen:]


def state_of(model: Model) -> list[Any]:
    """What must be as it was after a press: attributes, hooks, configs of every attention module."""
    return [
        (sorted(vars(module)), sorted(module._modules), len(module._forward_hooks), len(module._forward_pre_hooks),
         module.config._attn_implementation)
        for module in model.layers
    ]  # fmt: skip
