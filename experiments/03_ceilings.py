"""How close is "keep the largest weights" to the best kept set on SmolLM2-135M, and what do the nulls say?

The paper (ContourKV): median ceiling .021 to .047 per model; AUC of dropped mass .76 to .89; pi 1.07, 1.16, 1.39, 1.79
at 4, 8, 16, 32 keys (Qwen2.5-1.5B); the largest weights optimal in 39 % of rows at 4 keys and 21 % at 8; kappa at most
1.5 in 89 to 90 %; excess at 8 keys 1.02 to 1.03 for the largest weights, 1.4 to 2.1 for SnapKV, H2O, Quest and
StreamingLLM; shared sets 1.06 to 1.22. Prediction: the nulls come close to both the ceiling and the AUC, so neither
number says that values are arranged in the model's favour.

Rows: six of each of 30 x 9 heads in each of this project's eight documents of 1,100 to 1,500 tokens, fp32; budgets 4,
8, 16, 32; three nulls; cross-entropy of the held-out half with eight keys kept in flat, as many random, and all cells.

Run: python experiments/03_ceilings.py     Writes data/results/03_ceilings/summary.json. Takes about ten minutes on two
cores; a killed run continues (run folder runs/03_ceilings).
"""

from __future__ import annotations

import json
import sys
from functools import partial

from common import RESULTS, ROOT, TRACES, described, machine

import kvlens
from kvlens import model as models
from kvlens.provenance import plain
from kvlens.studies.row_tables import predictor_budget
from kvlens.studies.summary import summarise

LEAST_TOKENS = 1024
PAPER = {
    "ceiling_median": [0.021, 0.047],
    "auc": [0.76, 0.89],
    "pi": {"4": 1.07, "8": 1.16, "16": 1.39, "32": 1.79},
    "share_top_mass_optimal": {"4": 0.39, "8": 0.21},
    "share_kappa_close": [0.89, 0.90],
    "excess_at_8": {"top_mass": [1.02, 1.03], "snapkv, h2o, quest, streaming": [1.4, 2.1]},
    "shared_set_cost": [1.06, 1.22],
}


def main() -> None:
    model = models.load("smollm2-135m")
    run = kvlens.ceilings(
        TRACES / "documents.jsonl",
        model,
        ROOT / "runs" / "03_ceilings",
        cross_entropy=True,
        note=partial(print, file=sys.stderr, flush=True),
    )
    longest = run.rows.groupby("trace_id").n_keys.max()
    if (short := longest[longest < LEAST_TOKENS - LEAST_TOKENS // 6]).size:  # the last stretch holds the longest row
        raise SystemExit(f"documents under {LEAST_TOKENS} tokens: {list(short.index)}")
    budgets = run.meta["config"]["budgets"]
    summed = summarise(run.tables, budgets, predictor_budget(budgets), run.meta["seed"])  # by the code as it is now
    summary = plain(run.documents["summary"] | summed | described(model) | {"machine": machine(), "paper": PAPER})
    summary["model"] = run.documents["summary"]["model"]
    folder = RESULTS / "03_ceilings"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
