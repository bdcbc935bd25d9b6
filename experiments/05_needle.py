"""Which policies still answer for a fact stated early in a long text, under a quarter of its tokens?

Prediction: attention of the question finds the fact (query-aware snapkv, h2o); query-agnostic scorers keep it by chance,
about as often as random, since nothing marks a password as important before it is asked for.

1. Ten texts of 2,000 tokens, each another stretch of the project's documents with one sentence put in after 200 tokens:
   "The password of PLACE is WORD." The question is "The password of PLACE is"; an answer counts if WORD is in the next
   8 tokens, taken greedily.
2. Query-agnostic: the text is prefilled and evicted to the budget, then the question is asked of what is left.
   Query-aware: text and question are one prompt, evicted after.
3. All scorers with the same protection (4 sinks, the last 32 tokens), trigger `prefill`, one set of tokens for all
   layers and heads (`reduce: all`) and, where a scorer tells heads apart, also one for each head.
4. Query-agnostic also with larger budgets, to see what it takes.

`fitted` holds the weights of data/results/02_bands (labels of other texts). `oracle` needs labels and is left out.
Run: python experiments/05_needle.py [--scorer NAME]... [--try]     Writes data/results/05_needle.json; with --scorer only
these rows are measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np
import torch
from common import RESULTS, TRACES, described, machine, write

import kvlens
from kvlens import model as models
from kvlens.grading import contains
from kvlens.model import Model
from kvlens.policy import Policy
from kvlens.scorers.fitted import parameters_of
from kvlens.scorers.table import TABLE
from kvlens.texts import read_traces

BUDGET, LENGTH, DEPTH, NEW = 512, 2000, 200, 8
LADDER = (768, 1024, 1280, 1536, 1792)
PLACES = {
    "the harbour master's safe": "marigold",
    "the blue gate": "falcon",
    "the old observatory": "walnut",
    "the bakery cellar": "thunder",
    "the night ferry": "copper",
    "the museum attic": "lantern",
    "the river lock": "saffron",
    "the signal box": "meadow",
    "the chapel tower": "orchid",
    "the mountain hut": "pepper",
}
LEFT_OUT = {"oracle"}


def cases(model: Model) -> list[tuple[torch.Tensor, torch.Tensor, str]]:
    """1. Of each needle, the ids of its text, those of its question, and the answer."""

    def ids(text: str) -> list[int]:
        return list(model.tokenizer(text, add_special_tokens=False).input_ids)

    documents = ids("\n\n".join(trace.text or "" for trace in read_traces(TRACES / "documents.jsonl")))
    found = []
    for number, (place, word) in enumerate(PLACES.items()):
        needle = ids(f"\n\nThe password of {place} is {word}.\n\n")
        hay = np.roll(documents, -1000 * number)[: LENGTH - len(needle)].tolist()
        text = hay[:DEPTH] + needle + hay[DEPTH:]
        question = ids(f"\n\nThe password of {place} is")
        found.append((torch.tensor([text]), torch.tensor([question]), word))
    return found


def policy(name: str, budget: int, reduce: str) -> Policy:
    """3."""
    parameters = {}
    if name == "fitted":
        parameters = parameters_of(json.loads((RESULTS / "02_bands" / "evict-ranking" / "fitted.json").read_text()))
    return Policy(
        scorer={"name": name, "parameters": parameters},  # type: ignore[arg-type]
        budget={"tokens": budget},  # type: ignore[arg-type]
        protect={"sinks": 4, "recent": 32},  # type: ignore[arg-type]
        trigger="prefill",
        reduce=reduce,  # type: ignore[arg-type]
    )


@torch.inference_mode()
def answer(model: Model, chosen: Policy, text: torch.Tensor, question: torch.Tensor, *, aware: bool) -> str:
    """2. What is written after the question."""
    whole = torch.cat([text, question], 1)
    with kvlens.apply(chosen, model, record=False) as run:
        cache = None
        if not aware:
            model.hf(text, use_cache=True, logits_to_keep=1)
            cache = run.cache
            held = run.report().most_held
            assert held <= chosen.budget.tokens, held  # type: ignore[operator]
        out = model.hf.generate(
            whole, attention_mask=torch.ones_like(whole), past_key_values=cache, max_new_tokens=NEW, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
    return str(model.tokenizer.decode(out[0, whole.shape[1] :]))


def row(model: Model, name: str, budget: int, reduce: str, n: int, *, aware: bool) -> dict[str, Any]:
    chosen = policy(name, budget, reduce)
    found = [answer(model, chosen, text, question, aware=aware) for text, question, _ in cases(model)[:n]]
    right = [contains(said, word) for said, (_, _, word) in zip(found, cases(model), strict=False)]
    seen = "query_aware" if aware else "query_agnostic"
    result = {"scorer": name, "reduce": reduce, "budget": budget, "visibility": seen, "right": int(sum(right)), "n": n}
    print(json.dumps(result | {"said": found[0]}), file=sys.stderr, flush=True)
    return result | {"said": found}


def full(model: Model, n: int) -> dict[str, Any]:
    """The full cache."""
    return row(model, "sliding_window", 2 * LENGTH, "all", n, aware=True) | {"scorer": "full cache"}


def rows_of(model: Model, name: str, n: int) -> list[dict[str, Any]]:
    """2. to 4. for one scorer."""
    scorer = policy(name, BUDGET, "all").scorer.make()
    found = []
    for reduce in ("all", "head") if scorer.per_layer else ("all",):
        for aware in (False, True):
            found.append(row(model, name, BUDGET, reduce, n, aware=aware))
        found += [row(model, name, budget, reduce, n, aware=False) for budget in LADDER]
    return found


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
        rows += rows_of(model, name, n)
        if not arguments.trial:  # a long run that is stopped keeps what it has
            settings = {"length": LENGTH, "depth": DEPTH, "protect": {"sinks": 4, "recent": 32}, "trigger": "prefill"}
            write("05_needle", {**described(model), "machine": machine(), **settings, "rows": rows})


if __name__ == "__main__":
    main()
