"""`surprise` and `surprise_fast`: the same tokens stay as when the pass is run by itself, refresh after refresh."""

from __future__ import annotations

from typing import Any

import pytest
import surprise_oracles
import torch
from eviction import masked_logits, padded, policy, step_of_each, streamed_logits, written
from tiny import FAMILIES, llama, token_ids

from kvlens import model as models
from kvlens.errors import InputError, ModelRefused
from kvlens.model import Model
from kvlens.observables.surprise import Surprise
from kvlens.observables.surprise_variant import Variant, read_variant
from kvlens.probe.surprise_cycles import Cycle, cycles
from kvlens.runtime.apply import apply
from kvlens.runtime.cache import ledger_of
from kvlens.runtime.refresh import of_layer
from kvlens.scorers.interface import tensors

NAMES = {"surprise": "full", "surprise_fast": "fast"}


@pytest.fixture(scope="module")
def model() -> Model:
    return models.wrap(llama())


def settings(words: str = "", **changes: Any) -> dict[str, Any]:
    return {"parameters": {"variant": words}, "protect": {"sinks": 2, "recent": 3}, **changes}


@pytest.mark.parametrize("words", ["", "logprob,no_self", "gap=2"])
@pytest.mark.parametrize("scorer", NAMES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_kept_sets_are_those_of_the_cycles_of_a_given_text(name: str, scorer: str, words: str) -> None:
    model, ids, every, budget = models.wrap(FAMILIES[name]()), token_ids(72), 6, 18
    variant = read_variant(f"{NAMES[scorer]},{words}" if words else NAMES[scorer])
    expected = list(cycles(Surprise(model, variant), ids[0], Cycle(budget - 2, every, frozen=2, recent=3)))
    with apply(policy(scorer, tokens=budget, trigger=f"every:{every}", **settings(words)), model) as run:
        cache, found = None, []
        for stop in range(every, 73, every):
            streamed_logits(model, ids[:, stop - every : stop], [every], cache)
            cache = run.cache
            found.append(ledger_of(cache).sets[0][0, 0].tolist())
    assert len(expected) == 9
    for cycle in expected:
        assert found[cycle.n_seen // every - 1] == cycle.positions[cycle.kept].tolist()
    assert run.log.n_evictions == len(expected)


def slots_of(run: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and scores of every slot, [batch, slots]."""
    ledger = ledger_of(run.cache)
    found = of_layer(run.cache, ledger, run.layers[0], ledger.sets[0], run.means)
    return ledger.sets[0][:, 0], found[:, 0]


@pytest.mark.parametrize("scorer", NAMES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_scores_of_a_decoded_cache_are_those_written_out_slowly(name: str, scorer: str) -> None:
    model = models.wrap(FAMILIES[name]())
    if name == "gemma3" and scorer == "surprise":
        with pytest.raises(ModelRefused, match=r"layer 0, which slides"), apply(policy(scorer), model):
            pass
        return
    variant = read_variant(NAMES[scorer])
    with apply(policy(scorer, tokens=100), model) as run:
        streamed_logits(model, token_ids(30), [20, *[1] * 10])
    held = surprise_oracles.prefilled(model, 30)
    values, known = surprise_oracles.scores(model, held, variant)
    _, found = slots_of(run)
    assert found[0, :-1].isfinite().all()
    assert found[0, -1].isnan()
    torch.testing.assert_close(found[0, known].double(), values[known], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("scorer", NAMES)
def test_padding_between_two_turns_is_no_future(model: Model, scorer: str) -> None:
    ids = token_ids(36, batch=2)
    own = torch.ones_like(ids)
    own[0, :5], own[0, 20:26], own[1, 22:24] = 0, 0, 0
    with apply(policy(scorer, tokens=100), model) as run:
        streamed_logits(model, ids, [20, 10, *[1] * 6], own=own)
    positions, together = slots_of(run)
    for row in range(2):
        real = own[row].bool()
        with apply(policy(scorer, tokens=100), model) as run:
            streamed_logits(model, ids[row, real][None], [int(real.sum())])
        _, alone = slots_of(run)
        torch.testing.assert_close(together[row, real], alone[0], atol=1e-3, rtol=1e-3, equal_nan=True)
        assert together[row, ~real].isnan().all()
        assert (positions[row, ~real] == -1).all()


@pytest.mark.parametrize("scorer", NAMES)
def test_what_is_carried_goes_with_its_slots(model: Model, scorer: str) -> None:
    ids, own, rows = padded([22, 9, 17], 20)
    outputs = surprise_oracles.cached_rows(model, rows[0][None]).outputs
    with apply(policy(scorer), model) as run:
        streamed_logits(model, ids, [22, *[1] * 20], own=own)
    ledger = ledger_of(run.cache)
    positions = ledger.sets[0][:, 0]
    assert {name for name, _ in tensors(ledger.state)} == (
        {"state.ids"} if scorer == "surprise" else {"state.ids", "state.states"}
    )
    for row, tokens in enumerate(rows):
        assert ledger.state.ids[row].tolist() == tokens[positions[row].long()].tolist()
    if scorer == "surprise_fast":
        held = positions[0].long()
        before_any_left = held < 22
        torch.testing.assert_close(
            ledger.state.states[0, before_any_left], outputs[1][0, held[before_any_left]], atol=1e-4, rtol=1e-4
        )
    for _, tensor in tensors(ledger.state):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.shape[1] == 12


@pytest.mark.parametrize("scorer", NAMES)
def test_generate_equals_the_masked_reference_and_leaves_nothing(model: Model, scorer: str) -> None:
    ids, own, _ = padded([30, 21], 0)
    before = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules()]
    backends = [module.config._attn_implementation for module in model.layers]
    with apply(policy("h2o"), model), apply(policy(scorer), model) as run:  # made inside another run's override
        found = written(model, ids, 10, attention_mask=own)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.hf.modules()] == before
    assert [module.config._attn_implementation for module in model.layers] == backends
    events, logits = run.events(), torch.stack(found.logits, 1)
    for row, n in enumerate((30, 21)):
        tokens = found.sequences[row, -10 - n :]
        steps = step_of_each([30, *[1] * 10])[-10 - n :]
        expected = masked_logits(model, tokens, events[events.row == row], steps)[-11:-1]
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("sentence", "units of text"),
        ("clause", "units of text"),
        ("layers=2", "contradicts"),
        ("loud", "no variant word 'loud'"),
        (7, "valid string"),
    ],
)
def test_words_that_no_decoder_can_follow_are_refused(words: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        policy("surprise", **settings(words))


@pytest.mark.parametrize("changes", [{"reduce": "head"}, {"reduce": "layer"}, {"storage": "ragged"}])
def test_it_decides_for_all_layers_at_once(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="scorer surprise_fast reads the same tokens in every layer"):
        policy("surprise_fast", **changes)


def test_embeddings_have_no_ids(model: Model) -> None:
    with pytest.raises(InputError, match="reads token ids"), apply(policy("surprise"), model):
        model.decoder(inputs_embeds=torch.zeros(1, 4, model.d_model), use_cache=True)


def test_the_pass_is_made_once_for_a_run(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Variant] = []
    own = Surprise.__init__

    def counted(self: Surprise, model: Model, variant: Variant) -> None:
        made.append(variant)
        own(self, model, variant)

    monkeypatch.setattr(Surprise, "__init__", counted)
    with apply(policy("surprise_fast"), model) as run:
        written(model, token_ids(30), 10)
    assert run.log.n_evictions == 10
    assert [variant.name for variant in made] == ["fast"]
