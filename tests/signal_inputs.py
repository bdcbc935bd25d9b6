"""What every signal can be fed with: made inputs of a whole trace by name, and the chunk of them that tokens give."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import signal_oracles
import torch
from torch import Tensor

from kvlens.observables.table import Signal

D_MODEL, N_HEADS, N_KV_HEADS, D_HEAD, N_VOCAB = 12, 4, 2, 6, 23


def inputs(n_pos: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Everything a row of the table may take for one layer, `hidden_change` being what a row before gives."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(dtype)

    later = torch.ones(n_pos, n_pos, dtype=torch.bool).triu(1)
    change = drawn(n_pos, scale=3.0).abs()
    change[0] = torch.nan
    ids = torch.randint(N_VOCAB, (n_pos,), generator=generator)
    return {
        "hidden": drawn(n_pos, D_MODEL, scale=5.0),
        "keys": drawn(N_KV_HEADS, n_pos, D_HEAD, scale=2.0),
        "values": drawn(N_KV_HEADS, n_pos, D_HEAD),
        "weights": drawn(N_HEADS, n_pos, n_pos, scale=3.0).float().masked_fill(later, -torch.inf).softmax(-1).to(dtype),
        "logits": drawn(n_pos, N_VOCAB, scale=4.0),
        "ids": ids,
        "counts": torch.bincount(ids, minlength=N_VOCAB)[ids],
        "hidden_change": change,
    }


def piece(whole: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """What the tokens [start, stop) give: their rows, and of attention weights no key that comes later."""
    found = {name: whole[name][..., start:stop] for name in ("ids", "counts", "hidden_change")}
    found |= {name: whole[name][..., start:stop, :] for name in ("hidden", "keys", "values", "logits")}
    return found | {"weights": whole["weights"][..., start:stop, :stop]}


def chunks(whole: Mapping[str, Tensor], borders: Sequence[int]) -> Iterator[dict[str, Tensor]]:
    """The trace cut at these positions."""
    edges = [0, *borders, whole["ids"].shape[-1]]
    for start, stop in itertools.pairwise(edges):
        yield piece(whole, start, stop)


def only(signal: Signal, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Just what the signal takes; a row that scores all layers together gets two of them."""
    found = {name: given[name] for name in signal.takes}
    if not signal.per_layer and "keys" in found:
        found = {name: torch.stack([states, states.flip(-1) * 0.7]) for name, states in found.items()}
    return found


def oracle(name: str, given: Mapping[str, Tensor]) -> np.ndarray:
    """What the signal must be, from exactly the numbers in `given` (see `only`)."""
    if name == "hidden_change_rolling":
        function = signal_oracles.rolling_mean
    elif name == "hidden_change_z":
        function = signal_oracles.zscore
    elif name in ("key_var", "value_var"):
        function = signal_oracles.variance
    elif name in ("key_norm", "value_norm"):
        function = signal_oracles.norm
    else:
        function = getattr(signal_oracles, name)
    return function(*((tensor.double() if tensor.is_floating_point() else tensor).numpy() for tensor in given.values()))
