"""Which methods hold the bytes that they claim, and what is their lead worth once they do?

Prediction: presses that only mark what they drop (AdaKV, CriticalAdaKV, KVzip, ThinK) hold everything; evicting what
they marked changes nothing they say, and keeps their lead when heads may hold different numbers, while cutting every
head to the same number loses it. The same scorer loses less where an allocator shares the budget among layers and
heads. A scorer that has seen the question does better than the same one before.

1. Every scorer and every press of kvpress that can run by its name, on four texts of the project cut to 1,024 tokens
   (the last 48 are the target), a quarter of the tokens kept, 4 sinks and the last 32 protected, evicted once; what a
   press only marks also enforced in three shapes of storage; and scorers of ours under allocators, as policies.
2. The same scorers, and the presses that look for what is asked, on four texts with a question about an early sentence,
   compressed before and after the question is seen.

Run: python experiments/06_audit.py [--try]     Writes data/results/06_audit.json
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import TRACES, described, machine, write

import kvlens
from kvlens import model as models
from kvlens.model import Model
from kvlens.records import Question, Trace
from kvlens.texts import read_traces

KEEP, LENGTH, N_TEXTS = 0.25, 1024, 4
ASKING_PRESSES = ("SnapKV", "TOVA", "KVzip", "AdaKV", "Knorm", "ExpectedAttention")
SHARED = (
    ("snapkv", "pyramid"), ("snapkv", "ada"), ("snapkv", "contour"), ("snapkv", "contour_mass"),
    ("expected_attention", "ada"), ("kvzip", "ada"), ("kvzip", "contour"),
)  # fmt: skip
FACTS = {
    "the blue gate": "falcon",
    "the stone bridge": "thunder",
    "the night ferry": "copper",
    "the old library": "walnut",
}
COLUMNS = (
    "method", "source", "storage", "reduce", "visibility", "n_texts", "claimed_bytes", "claimed_side_bytes",
    "physical_bytes", "side_bytes",
    "full_bytes", "peak_bytes", "simulated", "kept_tokens_total", "kl_nats", "next_token_agreement", "verdict",
)  # fmt: skip


def documents(model: Model, n_tokens: int) -> list[str]:
    """The first documents of the project, cut to this many tokens."""
    found = []
    for trace in read_traces(TRACES / "documents.jsonl", limit=N_TEXTS):
        offsets = model.tokenizer(trace.text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
        found.append(str(trace.text)[: offsets[n_tokens - 1][1]])
    return found


def with_questions(model: Model) -> list[Trace]:
    """2. A sentence after the first two hundred characters' paragraph, its question at the end."""
    found = []
    for text, (place, word) in zip(documents(model, LENGTH - 32), FACTS.items(), strict=True):
        cut = text.index("\n\n") if "\n\n" in text[:600] else text.index(". ") + 1
        prompt = f"{text[:cut]}\n\nThe password of {place} is {word}.\n\n{text[cut:].strip()}"
        asked = Question(f"\n\nThe password of {place} is", target=f" {word}.", answer=(word,))
        found.append(Trace(place, prompt=prompt, target=f" {word}.", questions=(asked,)))
    return found


def policies(folder: Path) -> list[Path]:
    """1. The files of scorers whose budget an allocator shares; the audit gives them the common budget."""
    files = []
    for scorer, allocator in SHARED:
        files.append(folder / f"{scorer}+{allocator}.json")
        reduce = "layer" if allocator == "pyramid" else "head"
        kvlens.export(None, files[-1], scorer=scorer, allocate=allocator, reduce=reduce, keep_fraction=KEEP)
    return files


def rows(run: kvlens.Run) -> list[dict[str, Any]]:
    """The audit's rows, with the loss on every text."""
    losses = {key: list(group.kl_nats) for key, group in run.cases.groupby(["method", "visibility"], sort=False)}
    return [
        {name: row[name] for name in COLUMNS} | {"kl_nats_by_text": losses[row["method"], row["visibility"]]}
        for row in run.documents["audit"]["rows"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--try", dest="trial", action="store_true", help="one short text; print, write nothing")
    trial = parser.parse_args().trial
    model = models.load("smollm2-135m", device="cpu", dtype="float32")
    length = 200 if trial else LENGTH
    texts = [Trace(f"text {number}", text=text) for number, text in enumerate(documents(model, length))]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        common = {"keep_fraction": KEEP, "scorers": ["all"]}
        plain = kvlens.audit(
            texts[: 1 if trial else None],
            model,
            out / "a",
            presses=["all"],
            policies=policies(out),
            enforce=True,
            **common,
        )
        asked = kvlens.audit(
            with_questions(model)[: 1 if trial else None],
            model,
            out / "b",
            presses=ASKING_PRESSES,
            question_last=True,
            **common,
        )
        results = {
            **described(model),
            "machine": machine(),
            "keep_fraction": KEEP,
            "length": length,
            "protect": {"sinks": 4, "recent": 32},
            "seconds_a_text": plain.meta["wall_seconds"] / len(texts[: 1 if trial else None]),
            "rows": rows(plain),
            "asked": rows(asked),
            "differences": asked.documents["audit"]["differences"],
        }
    if trial:
        print(results)
        return
    write("06_audit", results)


if __name__ == "__main__":
    main()
