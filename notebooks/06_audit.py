# %% [markdown]
# # What do methods hold, and what is their lead worth?
#
# A method that masks what it drops says "half of the cache" and keeps all of it. An audit lets every method compress
# the same text under the same protection, counts the bytes that are really held, and asks what the model says then.
#
# You will see
# 1. a small audit of kvlens' scorers and of presses of kvpress, claimed bytes beside held ones;
# 2. what a press that only marks is worth once its marks are evicted, in three shapes of storage;
# 3. what it is worth to have seen the question;
# 4. a method of your own, and how a cheat is caught.
#
# The whole takes minutes on two CPU cores; `experiments/06_audit.py` audits everything.

# %%
import importlib.util
import tempfile
from pathlib import Path

import pandas as pd

import kvlens
from kvlens import model, plots
from kvlens.records import Question, Trace
from kvlens.texts import read_traces

OUT = Path(tempfile.mkdtemp())  # name a folder of your own to keep the runs
smol = model.load("smollm2-135m", device="cpu", dtype="float32")
document = read_traces("../data/traces/documents.jsonl")[0].text
text = [Trace("lighthouse", text=document[:1800])]
PRESSES = ["Knorm", "SnapKV", "AdaKV", "Think"] if importlib.util.find_spec("kvpress") else []
PRESSES or "kvpress is not installed (extra presses): the audit is of kvlens' own scorers"

# %% [markdown]
# ## Claimed and held
#
# A quarter of the tokens may stay; 4 sinks and the last 32 tokens stay under every method.

# %%
SCORERS = ["random", "sliding_window", "keynorm", "snapkv", "h2o", "hidden_change"]
run = kvlens.audit(text, smol, OUT / "audit", scorers=SCORERS, presses=PRESSES, keep_fraction=0.25, enforce=True)
rows = pd.DataFrame(run.documents["audit"]["rows"]).set_index("method")
rows[["claimed_bytes", "physical_bytes", "side_bytes", "simulated", "kl_nats", "next_token_agreement", "verdict"]]

# %%
plots.claimed_and_held(run)

# %% [markdown]
# ## What is a lead worth?
#
# A press that marks different tokens in every head keeps its lead only where heads may really hold different numbers.
# `ragged` deletes exactly what was marked, so its KL is the one that was reported; `padded` makes every head of a layer
# as wide as the widest; `uniform_cap` cuts every head to the same number.

# %%
rows[rows.storage.notna()][["storage", "claimed_bytes", "physical_bytes", "kl_nats", "verdict"]]

# %% [markdown]
# ## Before and after the question
#
# One sentence of the text is asked for at its end. A query-agnostic method compresses before it has seen the question,
# a query-aware one after; the two are different games.

# %%
place, word = "the blue gate", "falcon"
prompt = f"{document[:300]}\n\nThe password of {place} is {word}.\n\n{document[300:1800]}"
question = Question(f"\n\nThe password of {place} is", target=f" {word}.", answer=(word,))
asked = [Trace("gate", prompt=prompt, target=f" {word}.", questions=(question,))]
both = kvlens.audit(asked, smol, OUT / "asked", scorers=SCORERS, keep_fraction=0.25, question_last=True)
found = pd.DataFrame(both.documents["audit"]["rows"])
found.pivot(index="method", columns="visibility", values="kl_nats").sort_values("query_agnostic")

# %% [markdown]
# ## Your turn
#
# 1. `kvlens.audit(text, policies=["my.json"], ...)` audits a file that `kvlens export` wrote, with its own budget.
# 2. Give a policy `allocate={"name": "contour"}, reduce="head", storage="ragged"` and a scorer that tells heads apart.
#    What do `padded` and `uniform_cap` make of it?
# 3. `scorers=["all"], presses=["all"]` runs everything; give it short texts or time.
