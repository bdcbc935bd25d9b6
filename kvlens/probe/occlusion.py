"""What does the model lose when a span of its cache is hidden, cut off, or replaced?

Three interventions, one form. A counterfactual is (first, cut, hidden, ids): tokens from position `first` on are
recomputed with `ids`, and queries at positions >= `cut` do not see the keys `hidden`; everything before `first`
equals the full run and is shared.

1. prefill positions [0, n - 1) once, in chunks, and keep their keys and values;
2. turn every window into a counterfactual: evict (first = cut = n - 1), lag K (first = cut = min(end + K, n - 1)),
   knockout (lag 0), substitute (first = start, nothing hidden, other ids);
3. batch counterfactuals that start near each other, compute their tokens over the shared prefix, read the target.

n counts context tokens; the row at n - 1, the last context token, predicts the first target token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from kvlens import model as models
from kvlens.errors import InputError
from kvlens.linear import fast_linear
from kvlens.model import Model
from kvlens.probe.attention import KeyValues, SharedPrefixAttention
from kvlens.probe.readout import Effects, Metric, Reference, make_reference, read
from kvlens.records import Tokens
from kvlens.segmenting import check_window

INTERVENTIONS = ("evict", "knockout", "substitute")
FILLERS = ("randmulti", "random", "pad", "eos")
PREFILL_CHUNK = 1024


@dataclass(frozen=True)
class Intervention:
    """How windows are occluded; `cells` (layer, head) limits evict and knockout to those heads, None means all."""

    kind: str = "evict"
    lag: int | None = None
    cells: Bool[np.ndarray, "layer head"] | None = None
    filler: str = "randmulti"
    filler_id: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in INTERVENTIONS:
            raise InputError(f"intervention {self.kind!r} does not exist", f"choose one of {', '.join(INTERVENTIONS)}")
        if self.filler not in FILLERS and self.filler_id is None:
            raise InputError(f"filler {self.filler!r} does not exist", f"choose one of {', '.join(FILLERS)}")
        if self.kind == "substitute" and (self.cells is not None or self.lag is not None):
            raise InputError(
                "substitute changes the text itself, so layers, heads or a lag make no sense with it",
                "use evict or knockout with --cells or --lag",
            )
        if self.lag is not None and (self.kind == "knockout" or self.lag < 0):
            raise InputError(
                f"lag {self.lag} with {self.kind}: a lag is a number of tokens >= 0 and belongs to evict",
                "knockout is lag 0, evict without --lag drops at the end of the context",
            )


@dataclass(frozen=True)
class Counterfactual:
    """One altered continuation; arrays run over the input positions [0, n_tokens - 1)."""

    first: int
    cut: int
    hidden: Bool[np.ndarray, " pos"] | None = None
    ids: Int64[np.ndarray, " pos"] | None = None


def counterfactual(tokens: Tokens, window: tuple[int, int], how: Intervention, model: Model) -> Counterfactual:
    """The counterfactual of hiding, cutting off or replacing positions [start, end) of the context."""
    check_window(tokens, window)
    start, end = window
    last = tokens.n_context - 1
    n_inputs = tokens.n_tokens - 1
    if how.kind == "substitute":
        ids = tokens.ids[:n_inputs].copy()
        ids[start:end] = filler_ids(how, end - start, start, model)
        return Counterfactual(first=start, cut=n_inputs, ids=ids)
    hidden = np.zeros(n_inputs, dtype=bool)
    hidden[start:end] = True
    lag = 0 if how.kind == "knockout" else how.lag
    cut = last if lag is None else min(end + lag, last)
    return Counterfactual(first=cut, cut=cut, hidden=hidden)


def filler_ids(how: Intervention, n: int, start: int, model: Model) -> Int64[np.ndarray, " pos"]:
    """The n token ids that replace a window; random ones are seeded by (seed, window start) and never special."""
    if how.filler_id is not None:
        return np.full(n, how.filler_id, dtype=np.int64)
    if how.filler in ("pad", "eos"):
        name = f"{how.filler}_token_id"
        found = getattr(model.tokenizer, name, None)
        if found is None:
            raise InputError(f"{model.name} has no {how.filler} token to fill with", "use --filler randmulti")
        return np.full(n, int(found), dtype=np.int64)
    special = set(getattr(model.tokenizer, "all_special_ids", None) or ())
    n_known = min(model.d_vocab, len(model.tokenizer)) if model.tokenizer is not None else model.d_vocab
    ordinary = np.array([i for i in range(n_known) if i not in special], dtype=np.int64)
    generator = np.random.default_rng((how.seed, start))
    if how.filler == "random":
        return np.full(n, generator.choice(ordinary), dtype=np.int64)
    return generator.choice(ordinary, size=n, replace=n > len(ordinary))


def make_batches(firsts: Sequence[int], n_inputs: int, rows: int) -> list[list[int]]:
    """Indices of counterfactuals grouped so that a batch computes about `rows` tokens, neighbours together.

    A batch starts at its earliest `first`, so members that start later recompute a few unchanged tokens; the
    spread inside a batch is therefore kept under an eighth of its length.
    """
    order = sorted(range(len(firsts)), key=lambda i: (firsts[i], i))
    batches: list[list[int]] = []
    for index in order:
        if batches:
            head = firsts[batches[-1][0]]
            length = n_inputs - head
            if (len(batches[-1]) + 1) * length <= rows and (firsts[index] - head) * 8 <= length:
                batches[-1].append(index)
                continue
        batches.append([index])
    return batches


class Engine(ABC):
    """What every engine shares: one trace, its prefix computed once, its full-cache reference, effects of batches.

    An engine says how keys and values of the prefix come about (`_prefill`) and how counterfactual rows run over
    them (`_states`).
    """

    def __init__(self, model: Model, tokens: Tokens, how: Intervention, *, metric: Metric | None = None) -> None:
        self.model, self.tokens, self.how, self.metric = model, tokens, how, metric
        self.n_inputs = tokens.n_tokens - 1
        self.last = tokens.n_context - 1
        self.ids = torch.from_numpy(tokens.ids[: self.n_inputs]).to(model.device)
        self.targets = torch.from_numpy(tokens.ids[tokens.n_context :]).to(model.device)
        self.cells = None if how.cells is None else torch.from_numpy(how.cells).to(model.device)
        with torch.inference_mode():
            self.prefix = self._prefill(self.ids[: self.last])
            states = self._states([Counterfactual(self.last, self.last)])
            self.reference: Reference = make_reference(model, states, self.targets, metric)

    def counterfactual(self, window: tuple[int, int]) -> Counterfactual:
        """The counterfactual of one window under this engine's intervention."""
        return counterfactual(self.tokens, window, self.how, self.model)

    @torch.inference_mode()
    def run(self, batch: Sequence[Counterfactual]) -> Effects:
        """Effects of one batch, in its order."""
        return read(self.model, self._states(batch), self.targets, self.reference, self.metric)

    def row_ids(self, batch: Sequence[Counterfactual]) -> Int[Tensor, "row pos"]:
        """The input ids of every row of a batch."""
        rows = [self.ids if c.ids is None else torch.from_numpy(c.ids).to(self.ids.device) for c in batch]
        return torch.stack(rows)

    @abstractmethod
    def _prefill(self, ids: Int[Tensor, " pos"]) -> list[KeyValues]:
        """Keys and values [1, kv_head, pos, d_head] of every layer for a plain causal run over `ids`."""

    @abstractmethod
    def _states(self, batch: Sequence[Counterfactual]) -> Tensor:
        """Hidden states [row, target, d_model] at the rows that predict the target."""


class Occluder(Engine):
    """The fast engine: counterfactuals run in batches over one prefix that is never copied.

    Cost: building it prefills n - 1 tokens and reads the target once; a batch costs its recomputed tokens.
    Memory: one prefix cache; a batch adds its own rows' activations and never a copy of the prefix.
    """

    def _prefill(self, ids: Int[Tensor, " pos"]) -> list[KeyValues]:
        return prefill(self.model, ids)

    def _states(self, batch: Sequence[Counterfactual]) -> Tensor:
        first = min(c.first for c in batch)
        attention = self.attention(batch, first)
        ids = self.row_ids(batch)[:, first:]
        states = forward_rows(self.model, ids, first, attention)
        return states[:, self.last - first :]

    def attention(
        self, batch: Sequence[Counterfactual], first: int, *, n_room: int = 0, keep: bool = False
    ) -> SharedPrefixAttention:
        """The attention of a batch that starts at `first`, with room for `n_room` tokens past the inputs."""
        hidden = torch.zeros(len(batch), self.n_inputs + n_room, dtype=torch.bool)
        for row, c in enumerate(batch):
            if c.hidden is not None:
                hidden[row, : self.n_inputs] = torch.from_numpy(c.hidden)
        return SharedPrefixAttention(
            [(keys[:, :, :first], values[:, :, :first]) for keys, values in self.prefix],
            first,
            hidden.to(self.ids.device),
            torch.tensor([c.cut for c in batch], device=self.ids.device),
            self.model.sliding,
            cells=self.cells,
            keep=keep,
        )


def forward_rows(model: Model, ids: Int[Tensor, "row query"], first: int, attention: SharedPrefixAttention) -> Tensor:
    """Hidden states after the final norm of rows that start at position `first`, under the given attention."""
    positions = torch.arange(first, first + ids.shape[1], device=ids.device)
    with fast_linear(), models.attention_override(model, attention):
        return models.hidden(model, ids, positions=positions, cache=models.private_cache(model, first))


def prefill(model: Model, ids: Int[Tensor, " pos"], *, chunk: int = PREFILL_CHUNK) -> list[KeyValues]:
    """Keys and values [1, kv_head, pos, d_head] of every layer for a plain causal run over `ids`.

    In chunks, so that activations stay small; sliding-window layers keep all their rows (what a query may see is
    decided by the mask). Cost: one forward pass.
    """
    prefix: list[KeyValues] = []
    for lo in range(0, max(1, ids.shape[0]), chunk):
        piece = ids[lo : lo + chunk]
        nothing = torch.zeros(1, ids.shape[0], dtype=torch.bool, device=ids.device)
        cut = torch.tensor([ids.shape[0]], device=ids.device)
        attention = SharedPrefixAttention(prefix, lo, nothing, cut, model.sliding, keep=True)
        forward_rows(model, piece[None], lo, attention)
        new = [attention.private[layer] for layer in range(model.n_layers)]
        prefix = [_joined(old, fresh) for old, fresh in zip(prefix, new, strict=True)] if prefix else new
    return prefix


def _joined(old: KeyValues, new: KeyValues) -> KeyValues:
    return torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2)


def windows_of(tokens: Tokens, width: int, stride: int, *, start: int = 0) -> list[tuple[int, int]]:
    """All windows of `width` tokens from `start` on, a stride apart, inside [0, n - 1).

    The last may be shorter; one that would only repeat the end of the window before it is left out.
    """
    if width < 1 or stride < 1:
        raise InputError(f"window {width} and stride {stride} must be at least 1 token")
    last = tokens.n_context - 1
    stop = last if stride >= width else max(start + 1, last - width + stride)
    return [(pos, min(pos + width, last)) for pos in range(start, min(stop, last), stride)]


def total_tokens(batches: Iterable[Sequence[int]], firsts: Sequence[int], n_inputs: int) -> int:
    """How many tokens a plan computes: what time is estimated from."""
    return sum(len(batch) * (n_inputs - min(firsts[i] for i in batch)) for batch in batches)
