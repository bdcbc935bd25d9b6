"""Make the label set this repository ships: every context token of the project's own traces, evict, window 1, fp32.

Run: python experiments/01_release_labels.py     Writes data/labels/ (Parquet tables, README.md as the data card)
Takes minutes; a killed run continues (the run folder is runs/release).
"""

from __future__ import annotations

import hashlib
import json
import shutil

from common import ROOT, TRACES

import kvlens
from kvlens.loading import Run

LABELS = ROOT / "data" / "labels"
TABLES = ("windows", "tokens", "traces")
CARD = """---
license: apache-2.0
language: [en]
pretty_name: kvlens eviction labels
configs:
- config_name: tokens
  data_files: tokens.parquet
  default: true
- config_name: windows
  data_files: windows.parquet
- config_name: traces
  data_files: traces.parquet
---

# Eviction labels of the project's own traces

How much log-probability the target of each trace loses when one token is evicted from the KV cache at the end of the
context: `effect_nats = log p(target | full cache) - log p(target | the token's keys and values hidden)`. Made by
`experiments/01_release_labels.py`; the texts are those of `data/traces/traces.jsonl`, written for this project.

| | |
|---|---|
| model | {model} |
| fingerprint | `{fingerprint}` |
| intervention | `evict`, window 1, stride 1, all layers and heads |
| precision | {dtype} on {device} |
| traces, windows | {n_traces}, {n_windows:,} |
| noise floor | {noise_median:.1e} nats (median over {noise_windows} recomputed windows), {noise_max:.1e} (largest) |
| schema | `{schema}`, columns as in the README of the repository |
| licence | Apache-2.0, texts and labels |
| made with | kvlens {kvlens}, torch {torch}, transformers {transformers} |

- Position 0 is an attention sink: its effect is tens of nats whatever the token says. Leave it out of means and
  correlations.
- Effects keep their sign; {negative:.0%} of the windows (position 0 apart) have a negative one.
- The target's own tokens have no label: `effect_nats` is null there.
- An effect below the noise floor says nothing.

```python
import pandas, datasets
tokens = pandas.read_parquet("data/labels/tokens.parquet")
windows = datasets.load_dataset("data/labels", "windows", split="train")
```

| file | rows | bytes | sha256 |
|---|---|---|---|
{files}
"""


def card(run: Run) -> str:
    meta = run.meta
    rows = []
    for table in TABLES:
        content = (LABELS / f"{table}.parquet").read_bytes()
        rows.append(
            f"| {table}.parquet | {len(run[table]):,} | {len(content):,} | `{hashlib.sha256(content).hexdigest()}` |"
        )
    noise = meta["results"]["noise_nats"]
    windows = run.windows[run.windows.window_start > 0]
    return CARD.format(
        model=f"{meta['model']['name']} ({meta['model']['note']})",
        fingerprint=meta["model"]["fingerprint"],
        dtype=meta["dtype"],
        device=meta["device"],
        n_traces=len(run.traces),
        n_windows=len(run.windows),
        noise_median=noise["median"],
        noise_max=noise["max"],
        noise_windows=noise["n_windows"],
        schema=run.schema,
        negative=float((windows.effect_nats < 0).mean()),
        files="\n".join(rows),
        **{name: meta["versions"][name] for name in ("kvlens", "torch", "transformers")},
    )


def main() -> None:
    run = kvlens.label(TRACES / "traces.jsonl", "smollm2-135m", ROOT / "runs" / "release", note=print)
    LABELS.mkdir(parents=True, exist_ok=True)
    for table in TABLES:
        shutil.copyfile(ROOT / "runs" / "release" / f"{table}.parquet", LABELS / f"{table}.parquet")
    shutil.copyfile(ROOT / "runs" / "release" / "run.json", LABELS / "run.json")  # so that kvlens.load reads it too
    (LABELS / "README.md").write_text(card(run))
    print(json.dumps(run.meta["results"]))


if __name__ == "__main__":
    main()
