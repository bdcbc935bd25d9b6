"""Greedy answers under every intervention against a full forward pass a token, and which answers count as flipped."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import tiny_tokenizers
import torch
from transformers import GenerationConfig

from kvlens.errors import InputError, ModelRefused
from kvlens.model import Model, layer_masks, logits, stop_ids, wrap
from kvlens.probe.generation import answer_end, flips, full_answer, greedy
from kvlens.probe.occlusion import Counterfactual, Intervention, Occluder
from kvlens.records import Tokens, Trace
from kvlens.texts import tokenize

N_CONTEXT, N_TARGET, N_NEW = 24, 5, 10  # more new tokens than a sliding window of the tiny models holds
WINDOWS = [(2, 12), (14, 19), (18, 23), (22, 23)]
HOWS = {
    "evict": Intervention("evict"),
    "knockout": Intervention("knockout"),
    "lag": Intervention("evict", lag=3),
    "substitute": Intervention("substitute"),
}


def made_tokens(seed: int = 0, n_context: int = N_CONTEXT) -> Tokens:
    ids = tiny.token_ids(n_context + N_TARGET, seed=seed)[0].numpy()
    spans = np.full((len(ids), 2), -1, dtype=np.int32)
    return Tokens(Trace("made", prompt="p", target="t"), ids, 3, n_context, "pt", spans)


def nothing(tokens: Tokens) -> Counterfactual:
    last = tokens.n_context - 1
    return Counterfactual(last, last)


def visibility(n: int, window: tuple[int, int], how: Intervention) -> torch.Tensor:
    """What METHODS says each query sees, [query, key] over `n` tokens."""
    start, end = window
    last = N_CONTEXT - 1
    cut = {"evict": last if how.lag is None else min(end + how.lag, last), "knockout": end, "substitute": n}[how.kind]
    query, key = torch.arange(n)[:, None], torch.arange(n)[None]
    return (key <= query) & ~((query >= cut) & (key >= start) & (key < end))


def naive(
    model: Model, contexts: list[list[int]], windows: list[tuple[int, int]], how: Intervention
) -> tuple[list[list[int]], float]:
    """N_NEW greedy tokens of every row, a full forward pass over everything for each, and the closest call."""
    ids, closest = torch.tensor(contexts), float("inf")
    for _ in range(N_NEW):
        n = ids.shape[1]
        causal = torch.ones(len(windows), 1, n, n, dtype=torch.bool).tril()
        mask = torch.stack([visibility(n, window, how) for window in windows])[:, None]
        if how.cells is None:
            rows = logits(model, ids, mask=mask, last=1)[:, 0]
        else:
            cut = torch.from_numpy(how.cells)[:, None, :, None, None]
            with layer_masks(model, {layer: torch.where(cut[layer], mask, causal) for layer in range(model.n_layers)}):
                rows = logits(model, ids, mask=causal, last=1)[:, 0]
        best, second = rows.topk(2).values.unbind(-1)
        closest = min(closest, float((best - second).min()))
        ids = torch.cat([ids, rows.argmax(-1, keepdim=True)], 1)
    return ids[:, -N_NEW:].tolist(), closest


def check_against_naive(model: Model, how: Intervention) -> None:
    tokens = made_tokens()
    occluder = Occluder(model, tokens, how)
    batch = [*(occluder.counterfactual(window) for window in WINDOWS), nothing(tokens)]
    found = greedy(occluder, batch, max_new_tokens=N_NEW, stop_ids=())
    contexts = [(tokens.ids if c.ids is None else c.ids)[:N_CONTEXT].tolist() for c in batch]
    expected, closest = naive(model, contexts, [*WINDOWS, (0, 0)], how)
    assert found == expected
    assert closest > 1e-5  # no call so close that rounding decides it
    assert any(answer != expected[-1] for answer in expected)  # hiding changes an answer: else nothing was tested


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_every_token_is_the_one_of_a_full_forward_pass(name: str, how: Intervention) -> None:
    check_against_naive(wrap(tiny.FAMILIES[name]()), how)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["evict", "knockout"])
def test_with_some_layers_and_heads_only(name: str, kind: str) -> None:
    model = wrap(tiny.FAMILIES[name]())
    cells = np.zeros((model.n_layers, model.n_heads), dtype=bool)
    cells[0, 1], cells[1], cells[-1, :3] = True, True, True
    check_against_naive(model, Intervention(kind, cells=cells))


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_hiding_nothing_is_transformers_own_greedy_generation(name: str) -> None:
    model, tokens = wrap(tiny.FAMILIES[name]()), made_tokens(seed=1)
    (found,) = greedy(Occluder(model, tokens, HOWS["evict"]), [nothing(tokens)], max_new_tokens=N_NEW)
    context = torch.from_numpy(tokens.ids[None, :N_CONTEXT])
    with torch.no_grad():
        own = model.hf.generate(context, attention_mask=torch.ones_like(context), do_sample=False, max_new_tokens=N_NEW)
    expected = own[0, N_CONTEXT:].tolist()
    assert found == (expected[: expected.index(2)] if 2 in expected else expected)


def test_the_recorded_target_plays_no_part() -> None:
    model, tokens = wrap(tiny.llama()), made_tokens()
    other = tokens.ids.copy()
    other[N_CONTEXT:] = tiny.token_ids(N_TARGET, seed=9)[0].numpy()
    answers = []
    for ids in (tokens.ids, other):
        changed = Tokens(tokens.trace, ids, 3, N_CONTEXT, "pt", tokens.char_spans)
        for how in HOWS.values():
            occluder = Occluder(model, changed, how)
            answers.append(greedy(occluder, [occluder.counterfactual((5, 9))], max_new_tokens=N_NEW, stop_ids=()))
    assert answers[:4] == answers[4:]


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_rows_that_end_leave_the_others_as_they_were(how: Intervention) -> None:
    """Each row is given the end it reaches alone: at its stop token, or where `done` says so."""
    model, tokens = wrap(tiny.gemma3()), made_tokens()
    occluder = Occluder(model, tokens, how)
    batch = [occluder.counterfactual(window) for window in WINDOWS]
    whole = greedy(occluder, batch, max_new_tokens=N_NEW, stop_ids=())
    stops = {whole[0][4], whole[3][0]}
    ended = [next((row[:i] for i, token in enumerate(row) if token in stops), row) for row in whole]
    assert greedy(occluder, batch, max_new_tokens=N_NEW, stop_ids=stops) == ended
    assert len({len(row) for row in ended}) > 1
    assert ended[3] == []
    until = {tuple(row[: 2 + i]) for i, row in enumerate(whole)}
    found = greedy(occluder, batch, max_new_tokens=N_NEW, stop_ids=(), done=lambda ids: tuple(ids) in until)
    assert found == [next(row[:i] for i in range(1, N_NEW) if tuple(row[:i]) in until) for row in whole]


def test_every_stop_token_of_a_list_ends_an_answer() -> None:
    model, tokens = wrap(tiny.llama(), tiny_tokenizers.byte_level()), made_tokens()
    occluder = Occluder(model, tokens, HOWS["evict"])
    (whole,) = greedy(occluder, [nothing(tokens)], max_new_tokens=N_NEW, stop_ids=())
    model.hf.generation_config = GenerationConfig(eos_token_id=[96, whole[5]])
    assert stop_ids(model) == {96, whole[5]}
    assert greedy(occluder, [nothing(tokens)], max_new_tokens=N_NEW) == [whole[: whole.index(whole[5])]]
    model.hf.generation_config = GenerationConfig(eos_token_id=whole[0])
    assert greedy(occluder, [nothing(tokens)], max_new_tokens=N_NEW) == [[]]
    assert stop_ids(wrap(tiny.llama())) == {2}


def test_an_answer_stops_where_the_trained_context_is_full() -> None:
    model, tokens = wrap(tiny.gpt2(n_positions=N_CONTEXT + N_TARGET + 2)), made_tokens()
    (found,) = greedy(Occluder(model, tokens, HOWS["knockout"]), [nothing(tokens)], stop_ids=())
    assert len(found) == N_TARGET + 2


def test_a_tie_goes_to_the_lowest_id() -> None:
    hf_model = tiny.llama()
    weight = hf_model.lm_head.weight
    with torch.no_grad():
        weight[40:] = weight[3:40].repeat(2, 1)[: len(weight) - 40]  # every id from 40 on has a twin below
    tokens = made_tokens()
    (found,) = greedy(
        Occluder(wrap(hf_model), tokens, HOWS["evict"]), [nothing(tokens)], max_new_tokens=N_NEW, stop_ids=()
    )
    assert max(found) < 40


def test_logits_that_are_no_numbers_are_refused() -> None:
    model, tokens = wrap(tiny.llama()), made_tokens()
    occluder = Occluder(model, tokens, HOWS["evict"])
    with torch.no_grad():
        model.hf.lm_head.weight[7] = float("nan")
    with pytest.raises(ModelRefused, match="NaN"):
        greedy(occluder, [nothing(tokens)], max_new_tokens=2)


@pytest.mark.parametrize(
    ("text", "in_box", "head"),
    [
        ("so \\boxed{\\frac{1}{2}} and on", True, "so \\boxed{\\frac{1}{2}}"),
        ("so \\boxed{\\frac{1}{2", True, None),
        ("use \\boxed{} for it: \\boxed{3}.", True, "use \\boxed{} for it: \\boxed{3}"),
        ("The answer is 3. So \\boxed{3}", True, "The answer is 3. So \\boxed{3}"),
        ("The answer is 3. So \\boxed{3}", False, "The answer is 3."),
        ("So \\boxed{3} is it", False, "So \\boxed{3}"),
        ("4 eggs. The answer is 3.5 m. More", False, "4 eggs. The answer is 3.5 m."),
        ("The answer is 3.", False, None),
        ("The answer is \\frac{1}{2}. ", False, "The answer is \\frac{1}{2}."),
        ("The answer is:\n\n7\nThe answer is 8.\n", False, "The answer is:\n\n7\n"),
        ("It is 3. It is 4.\n", False, None),
        ("", False, None),
    ],
)
def test_where_an_answer_is_complete(text: str, in_box: bool, head: str | None) -> None:
    end = answer_end(text, in_box)
    assert (None if end is None else text[:end]) == head


# Flips


def test_without_a_stated_answer_any_other_text_is_a_flip() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    model = wrap(tiny.llama(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=None), tokenizer)
    trace = Trace("boxes", prompt="The red box is under the table.", reasoning=" Where is it?", target=" It is 41.")
    occluder = Occluder(model, tokenize(trace, tokenizer), HOWS["evict"])
    last = occluder.last
    batch = [Counterfactual(last, last), *(occluder.counterfactual((i, i + 1)) for i in range(last))]
    texts = [tokenizer.decode(ids) for ids in greedy(occluder, batch, max_new_tokens=3)]
    # A longer continuation than the full answer is compared as far as that goes.
    for full in (texts[0], texts[0][:2]):
        expected = [text[: len(full)].split() != full.split() for text in texts]
        assert {True, False} == set(expected[1:])
        assert flips(occluder, batch, full, max_new_tokens=3) == expected
    whole = tokenizer.decode(greedy(occluder, batch[:1], max_new_tokens=20)[0])
    assert full_answer(occluder) == whole[: len(" It is 41.")] != whole


def test_flips_need_a_tokenizer() -> None:
    tokens = made_tokens()
    with pytest.raises(InputError, match="no tokenizer"):
        flips(Occluder(wrap(tiny.llama()), tokens, HOWS["evict"]), [nothing(tokens)], "The answer is 4.")


@pytest.mark.real
@pytest.mark.parametrize("kind", ["evict", "knockout", "substitute"])
@pytest.mark.parametrize("target", [" The answer is 4.\n", " Answer: \\boxed{4}\n"])
def test_an_answer_flips_where_the_fact_it_rests_on_is_hidden(smollm2: Model, target: str, kind: str) -> None:
    shots = "".join(f"Box {box} holds {n} pens.{target.replace('4', str(n))}" for box, n in (("A", 5), ("B", 9)))
    trace = Trace("boxes", prompt=f"{shots}Box C holds 4 pens.", target=target)
    tokens = tokenize(trace, smollm2.tokenizer)
    occluder = Occluder(smollm2, tokens, Intervention(kind))
    fact = next(pos for pos in range(tokens.n_context) if smollm2.tokenizer.decode([int(tokens.ids[pos])]) == "4")
    batch = [nothing(tokens), occluder.counterfactual((fact, fact + 1)), occluder.counterfactual((3, 4))]
    assert flips(occluder, batch, target, max_new_tokens=12) == [False, True, False]
    assert full_answer(occluder, max_new_tokens=12) == target.rstrip()
    # Never as far as its answer: the answer is missing.
    assert flips(occluder, batch[:1], target, max_new_tokens=2) == [True]
