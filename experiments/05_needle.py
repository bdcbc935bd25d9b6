"""Which policies still answer for a fact stated early in a long text, under a quarter of its tokens?

Prediction: the question's attention finds the fact (query-aware snapkv, h2o); query-agnostic scorers keep it by chance,
about as often as random, since nothing marks a password as important before it is asked for.

1. Ten texts of 2,000 tokens, each another stretch of the project's documents with one sentence put in early:
   "The password of PLACE is WORD." The question is "The password of PLACE is"; an answer counts if WORD is in the next
   8 tokens, taken greedily.
2. Query-agnostic: the text is prefilled and evicted to the budget, then the question is asked of what is left.
   Query-aware: all but the question's last token is there before anything leaves; that one is asked of what is left
   (else the first word of the answer would be read off the full cache).
3. All scorers with the same protection (4 sinks, the last 32 tokens), trigger `prefill`; one set of tokens for all
   layers and heads (`reduce: all`) and, where a scorer tells heads apart, also one for each head.
4. Query-agnostic also with larger budgets, to see what it takes.

The texts are the rows of one batch, and all but their last two tokens go through the model once for every scorer: what
scorers remember of a text does not depend on how it is cut (tests/runtime), and nothing leaves before those two.
`fitted` holds the weights of data/results/02_bands. `oracle` needs labels and is left out.
Run: python experiments/05_needle.py [--scorer NAME]... [--try]     Writes data/results/05_needle.json
With --scorer only these rows are measured again.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from common import RESULTS, TRACES, described, machine, write
from torch import Tensor
from transformers.cache_utils import Cache

import kvlens
from kvlens import model as models
from kvlens.grading import contains
from kvlens.model import Model
from kvlens.policy import Policy
from kvlens.scorers.fitted import parameters_of
from kvlens.scorers.table import TABLE
from kvlens.texts import read_traces

BUDGET, LENGTH, LAST, NEW = 512, 2000, 2, 8
DEPTHS = range(100, 300, 20)  # no two at the same place: a seeded scorer draws by position
LADDER = (BUDGET, 768, 1024, 1536)
PROTECT = {"sinks": 4, "recent": 32}
PLACES = {
    "the garden shed": "marigold",
    "the blue gate": "falcon",
    "the old observatory": "walnut",
    "the stone bridge": "thunder",
    "the night ferry": "copper",
    "the museum attic": "lantern",
    "the river lock": "saffron",
    "the signal box": "meadow",
    "the chapel tower": "orchid",
    "the mountain hut": "pepper",
}
LEFT_OUT = {"oracle"}


def texts(model: Model) -> tuple[Tensor, Tensor]:
    """1. The ids of the texts and of the questions, one row a needle."""

    def ids(text: str) -> list[int]:
        return list(model.tokenizer(text, add_special_tokens=False).input_ids)

    documents = ids("\n\n".join(trace.text or "" for trace in read_traces(TRACES / "documents.jsonl")))
    rows, questions = [], []
    for number, ((place, word), depth) in enumerate(zip(PLACES.items(), DEPTHS, strict=True)):
        needle = ids(f"\n\nThe password of {place} is {word}.\n\n")
        hay = np.roll(documents, -1000 * number)[: LENGTH - len(needle)].tolist()
        rows.append(hay[:depth] + needle + hay[depth:])
        questions.append(ids(f"\n\nThe password of {place} is"))
    return torch.tensor(rows), torch.tensor(questions)  # places are chosen so that all questions are as long


def policy(name: str, budget: int, reduce: str) -> Policy:
    """3."""
    parameters = {}
    if name == "fitted":
        parameters = parameters_of(json.loads((RESULTS / "02_bands" / "evict-ranking" / "fitted.json").read_text()))
    return Policy(
        scorer={"name": name, "parameters": parameters},  # type: ignore[arg-type]
        budget={"tokens": budget},  # type: ignore[arg-type]
        protect=PROTECT,  # type: ignore[arg-type]
        trigger="prefill",
        reduce=reduce,  # type: ignore[arg-type]
    )


def answers(model: Model, chosen: Policy, cache: Cache, text: Tensor, question: Tensor, *, aware: bool) -> list[str]:
    """2. What is written after each question; the cache lacks the last two tokens of the texts and is not changed."""
    cache, whole = copy.deepcopy(cache), torch.cat([text, question], 1)
    before = whole[:, text.shape[1] - LAST : -1] if aware else text[:, -LAST:]
    with kvlens.apply(chosen, model, record=False) as run:
        model.hf(before, past_key_values=cache, use_cache=True, logits_to_keep=1)
        held, budget = run.report().most_held, chosen.budget.tokens or 0
        if held > budget:
            raise RuntimeError(f"{held} tokens are held under a budget of {budget}")
        out = model.hf.generate(
            whole, attention_mask=torch.ones_like(whole), past_key_values=cache, max_new_tokens=NEW, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
    return [str(said) for said in model.tokenizer.batch_decode(out[:, whole.shape[1] :])]


@torch.inference_mode()
def rows_of(model: Model, name: str, n: int, budgets: Sequence[int]) -> list[dict[str, Any]]:
    """2. to 4. for one scorer."""
    text, question = (ids[:n] for ids in texts(model))
    scorer, found = policy(name, BUDGET, "all").scorer.make(), []
    with kvlens.apply(policy(name, 2 * LENGTH, "all"), model, record=False) as run:
        model.hf(text[:, :-LAST], use_cache=True, logits_to_keep=1)
        cache = run.cache
    for reduce in ("all", "head") if scorer.per_layer else ("all",):
        for budget, aware in ((BUDGET, True), *((budget, False) for budget in budgets)):
            said = answers(model, policy(name, budget, reduce), cache, text, question, aware=aware)
            right = [bool(contains(one, word)) for one, word in zip(said, PLACES.values(), strict=False)]
            about = {"scorer": name, "reduce": reduce, "budget": budget}
            seen = {"visibility": "query_aware" if aware else "query_agnostic", "right": sum(right), "n": n}
            print(json.dumps(about | seen | {"said": said[0]}), file=sys.stderr, flush=True)
            found.append(about | seen | {"said": said})
    return found


def full(model: Model, n: int) -> dict[str, Any]:
    """The full cache: a budget above the length evicts nothing."""
    found = rows_of(model, "sliding_window", n, [2 * LENGTH])[1]
    return found | {"scorer": "full cache", "visibility": "query_aware"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scorer", action="append", choices=sorted(set(TABLE) - LEFT_OUT))
    parser.add_argument("--try", dest="trial", action="store_true", help="one needle; print, write nothing")
    arguments = parser.parse_args()
    model = models.load("smollm2-135m", device="cpu", dtype="float32")
    n = 1 if arguments.trial else len(PLACES)
    names = arguments.scorer or [name for name in TABLE if name not in LEFT_OUT]
    before = RESULTS / "05_needle.json"
    kept = json.loads(before.read_text())["rows"] if arguments.scorer and before.exists() else [full(model, n)]
    rows = [one for one in kept if one["scorer"] not in names]
    for name in names:
        rows += rows_of(model, name, n, LADDER)
        if not arguments.trial:  # a long run that is stopped keeps what it has
            settings = {"length": LENGTH, "depths": list(DEPTHS), "protect": PROTECT, "trigger": "prefill"}
            write("05_needle", {**described(model), "machine": machine(), **settings, "rows": rows})


if __name__ == "__main__":
    main()
