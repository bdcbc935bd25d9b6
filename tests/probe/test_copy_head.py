"""One key matters, by construction: its effect dominates and every other is nothing."""

from __future__ import annotations

import copy_head
import numpy as np
import pytest
import torch
from tiny import as_tokens
from torch import Tensor

from kvlens.model import wrap
from kvlens.probe.occlusion import Intervention, Occluder, windows_of
from kvlens.records import Tokens


def planted(p: int, relay: int | None = None) -> Tokens:
    """A context of 20 tokens with a key token at p, perhaps a relay, the question last; the answer as target."""
    ids = np.random.default_rng(p).integers(2, 6, 21)
    ids[0], ids[19], ids[p], ids[20] = copy_head.BOS, copy_head.QUESTION, copy_head.KEY + 3, copy_head.ANSWER + 3
    if relay is not None:
        ids[relay] = copy_head.RELAY
    return as_tokens(ids, 1)


def effects(hops: int, tokens: Tokens, how: Intervention) -> Tensor:
    model = wrap(copy_head.copy_head(hops))
    engine = Occluder(model, tokens, how)
    assert float(engine.reference.log_probs.exp()) > 0.95  # the head works
    found = [engine.run([engine.counterfactual(window)]).log_probs for window in windows_of(tokens, 1, 1)]
    return (engine.reference.log_probs - torch.cat(found))[:, 0]


def assert_only(found: Tensor, *important: int) -> None:
    for pos, effect in enumerate(found.tolist()):
        assert effect > 3 if pos in important else abs(effect) < 0.02, (pos, effect)


@pytest.mark.parametrize("p", [1, 8, 18])
def test_a_copy_head_needs_the_key_it_copies(p: int) -> None:
    tokens = planted(p)
    for how in (Intervention("evict"), Intervention("knockout"), Intervention("evict", lag=5)):
        assert_only(effects(1, tokens, how), p)
    assert effects(1, tokens, Intervention("substitute", filler_id=2))[p] > 3


def test_a_relay_separates_evict_from_knockout() -> None:
    """The key token is read by the relay 4 tokens on; the answer reads the relay. Late eviction spares the key."""
    key, relay = 6, 10
    tokens = planted(key, relay)
    assert_only(effects(2, tokens, Intervention("evict")), relay)
    assert_only(effects(2, tokens, Intervention("knockout")), key, relay)
    for lag, spared in ((0, False), (2, False), (3, False), (4, True), (9, True)):
        found = effects(2, tokens, Intervention("evict", lag=lag))
        assert_only(found, *((relay,) if spared else (key, relay)))


def test_a_relay_is_read_in_layer_one_and_the_key_in_layer_zero() -> None:
    key, relay = 6, 10
    tokens = planted(key, relay)
    for layer, read in enumerate((key, relay)):
        cells = np.zeros((2, 1), dtype=bool)
        cells[layer] = True
        assert_only(effects(2, tokens, Intervention("knockout", cells=cells)), read)
        assert_only(effects(2, tokens, Intervention("evict", cells=cells)), *((relay,) if layer == 1 else ()))
