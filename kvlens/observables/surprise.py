"""How badly does the future predict a token? `surprise` = -(its logit, given the cached rows after it).

1. A pass runs the model over the cached tokens again, at their own positions; keys and values come from the cache, and
   each row sees those of later rows alone (counter_causal.py). It starts with the embeddings and runs every block
   (`full`), or with the stored states that entered a later block and runs the last few (`layers=K`). `fast` is the
   last block alone, its MLP skipped.
2. The score is minus the logit of the token that stands there, a dot product with one row of the unembedding; `logprob`
   takes the log-sum-exp off, streamed over the vocabulary.
3. A token's own embedding is in the stream, so it helps to predict itself. `no_self` takes it out: the mean embedding
   stands in the place of its own, in the first block or, where a pass starts later, in the sum that enters it (what
   earlier blocks made of the token stays).
4. With sentences or clauses as units a row sees what comes after its unit, and the score of each of its tokens is
   minus the sum of the unit's log-probabilities: a mean would not do, for later words of a clause predict earlier ones.
5. A row that sees nothing has no score: `known` says so, and its value is 0.

The state is what a decoder must carry beside its cache: ids, positions and, for a pass that starts late, one state a
token. All scores are float32. A token's text enters its own score alone: the rest is what the cache holds.

Source: counter-causal surprise (parity: logit, own embedding in the stream, min_gap); `no_self`, `logprob`, units and
the turn to the past are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import model as models
from kvlens.errors import InputError, ModelRefused
from kvlens.linear import fast_linear
from kvlens.model import Model, Twin
from kvlens.observables.attention_weights import Rule
from kvlens.observables.counter_causal import Sight, attend, sdpa
from kvlens.observables.surprise_variant import Variant

SAME = 2**-6  # of the largest number: what half precision leaves of a difference
Layers = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Scores:
    """The surprise of each cached row; `known` is False where there is none, and the value 0."""

    values: Float[Tensor, "batch pos"]
    known: Bool[Tensor, "batch pos"]


@dataclass(frozen=True)
class State:
    """What a pass needs beside the cache: rows as the cache holds them, in order of position.

    `states` entered the pass's first block, and are None where that is the first of the model. `units` numbers the
    units of the text in their order. The first `n_pad` [batch] rows of a sequence are padding.
    """

    ids: Int[Tensor, "batch pos"]
    positions: Int[Tensor, "batch pos"]
    states: Float[Tensor, "batch pos d_model"] | None = None
    units: Int[Tensor, "batch pos"] | None = None
    n_pad: Int[Tensor, " batch"] | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes that carrying it takes: of the storages behind its tensors, each once."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._tensors().values()}
        return sum(storages.values())

    def append(self, new: State) -> State:
        """The state with the rows of `new` after its own. Raises: InputError where they do not fit together."""
        own, added = self._rows(), new._rows()
        if own.keys() != added.keys():
            raise InputError(f"rows with {sorted(added)} cannot follow rows with {sorted(own)}")
        for name, t in added.items():
            if (t.dtype, len(t), t.shape[2:]) != (own[name].dtype, len(own[name]), own[name].shape[2:]):
                raise InputError(f"{_words(name, t)} cannot follow {_words(name, own[name])}")
        if new.n_pad is not None and bool(new.n_pad.any()):
            raise InputError("padding can only come before a sequence", "pad on the left")
        return replace(self, **{name: torch.cat([own[name], added[name]], 1) for name in own})

    def select(self, kept: Int[Tensor, "batch kept"]) -> State:
        """The state of the kept rows alone, in fresh storage; `kept` ascends in each row."""
        rows = {
            name: t.gather(1, kept.reshape(*kept.shape, *[1] * (t.ndim - 2)).expand(*kept.shape, *t.shape[2:]))
            for name, t in self._rows().items()
        }
        n_pad = None if self.n_pad is None else (kept < self.n_pad[:, None]).sum(1)
        return State(**rows, n_pad=n_pad)

    def _rows(self) -> dict[str, Tensor]:
        return {name: t for name, t in self._tensors().items() if name != "n_pad"}

    def _tensors(self) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in ("ids", "positions", "states", "units", "n_pad")}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


class Surprise:
    """The pass of one variant over one model: `scores(state, layers)`.

    Raises: ModelRefused for a model of which no part can be run (see twin.py), InputError for more blocks than it has.
    """

    def __init__(self, model: Model, variant: Variant) -> None:
        n_run = model.n_layers if variant.layers is None else variant.layers
        if n_run > model.n_layers:
            raise InputError(
                f"a pass over the last {n_run} blocks: {model.name} has {model.n_layers}", "give a smaller layers=N"
            )
        self.model, self.variant = model, variant
        self.start = model.n_layers - n_run  # the block whose input a state stores, where it is not the first
        self._twin = Twin(model, self.start, skip_mlp=variant.skip_mlp)
        self._mean = models.mean_embedding(model) if variant.no_self else None
        if self._mean is not None and self.start:
            _require_additive(model)

    @torch.inference_mode()
    def scores(self, state: State, layers: Layers) -> Scores:
        """The surprise of every row; `layers` holds keys and values [batch, kv_head, pos, d_head] of every layer.

        Cost: `full` the model's blocks and half of full attention, `fast` one attention layer; memory a few times the
        rows' states, growing with their number.
        """
        self._check(state, layers)
        sight = self._sight(state)
        with fast_linear():
            hidden = self._run(state, layers, sight)
            found = models.unembed_at(self.model, hidden, state.ids)
            if self.variant.logprob:
                rows = hidden.reshape(-1, hidden.shape[-1])
                found = found - models.log_normaliser(self.model, rows).reshape(found.shape)
        if self.variant.unit is not None and state.units is not None:
            if state.n_pad is not None:  # padding may bear the number of the first unit
                row = torch.arange(found.shape[1], device=found.device)
                found = found.masked_fill(row < state.n_pad[:, None], 0)
            found = unit_sums(found, state.units)
        windows = self.model.sliding[self.start :]
        known = sight.known(None if None in windows else max(window for window in windows if window is not None))
        if not bool(torch.isfinite(found[known]).all()):
            raise ModelRefused(
                f"a pass of '{self.variant.name}' over {self.model.name} gave NaN or infinity", "use --dtype float32"
            )
        return Scores(torch.where(known, -found, 0.0), known)

    def _check(self, state: State, layers: Layers) -> None:
        """Nothing; raises InputError for a state and a cache that do not belong together, or not to this pass."""
        batch, n = state.ids.shape
        if self.model.hf.training:
            raise InputError(f"{self.model.name} is in training mode", "call model.hf.eval()")
        rows = {layers[layer][0].shape[::2] for layer in range(self.start, min(len(layers), self.model.n_layers))}
        if n == 0 or len(layers) != self.model.n_layers or rows != {(batch, n)}:
            raise InputError(
                f"a state of {n} rows in {batch} sequences and a cache of {len(layers)} layers with "
                f"{sorted(rows)} do not belong together",
                f"give keys and values of all {self.model.n_layers} layers, and the state of the same rows",
            )
        models.check_ids(self.model, (int(state.ids.min()), int(state.ids.max())))
        if self.start and (state.states is None or state.states.shape != (batch, n, self.model.d_model)):
            raise InputError(
                f"a pass from block {self.start} needs the states that entered it", "give one state for each row"
            )
        if self.variant.unit is None:
            return
        if state.units is None:
            raise InputError(f"a pass over {self.variant.unit}s needs to know which rows form one", "give state.units")
        if bool((state.units.diff(dim=1) < 0).any()):
            raise InputError("numbers of units descend", "number the units of a text in their order")

    def _sight(self, state: State) -> Sight:
        """Which rows each row sees."""
        edge = None
        if self.variant.unit is not None and state.units is not None:
            edge = unit_edges(state.units, first=self.variant.past)
        return Sight(state.positions, self.variant.min_gap, self.variant.past, edge, state.n_pad)

    def _run(self, state: State, layers: Layers, sight: Sight) -> Float[Tensor, "batch pos d_model"]:
        """The final-normed states of the pass."""
        own = models.causal_backend(self.model) or sdpa

        def call(layer: int, query: Tensor, _: Tensor, __: Tensor, keywords: Mapping[str, Any]) -> Tensor:
            rule = Rule.of_call(query, self.model.sliding[layer], keywords)
            return attend(query, *layers[layer], rule, sight, own)

        states, embeddings = state.states if self.start else None, None
        if self._mean is not None and states is None:
            embeddings = self._mean.to(self.model.dtype).expand(*state.ids.shape, -1)
        elif self._mean is not None and states is not None:
            own_embedding = self.model.decoder.get_input_embeddings()(state.ids)
            instead = (self._mean - own_embedding.float()) * models.embedding_scale(self.model)
            states = (states.float() + instead).to(states.dtype)
        return self._twin.run(call, ids=state.ids, positions=state.positions, states=states, embeddings=embeddings)


@torch.no_grad()
def _require_additive(model: Model) -> None:
    """Nothing; raises ModelRefused where an embedding does not enter the first block as it is, or scaled (3)."""
    ids = torch.arange(3, device=model.device)[None] % model.d_vocab
    entered: list[Tensor] = []
    with models.watch_input(model, entered.append):
        models.hidden(model, ids)
        models.hidden(model, ids.roll(1, 1))
    embed = model.decoder.get_input_embeddings()(ids).float()
    moved, wanted = entered[1].float() - entered[0].float(), embed.roll(1, 1) - embed
    wanted = wanted * models.embedding_scale(model)
    if moved.shape != wanted.shape or not torch.allclose(moved, wanted, atol=SAME * float(entered[0].abs().max())):
        raise ModelRefused(
            f"{model.name} changes embeddings on their way into its first block: no one can be taken out later",
            "use no_self with a full pass, or with_self",
        )


def _words(name: str, rows: Tensor) -> str:
    width = "".join(f" of {size} numbers" for size in rows.shape[2:])
    return f"{name} of {len(rows)} sequences{width} in {rows.dtype}"


def unit_edges(units: Int[Tensor, "batch pos"], *, first: bool = False) -> Int[Tensor, "batch pos"]:
    """For each row the last (or first) row of its unit."""
    ends = torch.searchsorted(units.contiguous(), units.contiguous(), right=not first)
    return ends if first else ends - 1


def unit_sums(values: Float[Tensor, "batch pos"], units: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos"]:
    """For each row the sum over its unit."""
    low, high = unit_edges(units, first=True), unit_edges(units)
    total = torch.nn.functional.pad(values.double().cumsum(1), (1, 0))
    return (total.gather(1, high + 1) - total.gather(1, low)).to(values.dtype)
