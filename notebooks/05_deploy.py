# %% [markdown]
# # From labels to a policy that really evicts
#
# A finding is worth something when a model can run on it. Here a policy is made from what was measured, put on a model
# that generates as usual, and asked what it held, what it threw away, and what became of a fact it was told early.
#
# You will see
# 1. labels, signals and bands of a few texts, and what `export` makes of them, also where there is no band;
# 2. the model generating under the policy, its cache kept to the budget, and which tokens left when;
# 3. the bytes it stores as it writes, with and without the policy;
# 4. a question about an early sentence, asked of what several policies have kept.
#
# The whole takes a few minutes on two CPU cores.

# %%
import tempfile
from pathlib import Path

import torch
from transformers import DynamicCache

import kvlens
from kvlens import model, plots
from kvlens.errors import KvlensError
from kvlens.runtime.meter import Meter
from kvlens.texts import read_traces

TRACES = Path("../data/traces/traces.jsonl")
OUT = Path(tempfile.mkdtemp())  # name a folder of your own to keep the runs
smol = model.load("smollm2-135m", device="cpu", dtype="float32")

# %% [markdown]
# ## From texts to a policy file
#
# Three texts are far too few to find a band; the point is that the same three lines go on to any number of them.

# %%
labels = kvlens.label(TRACES, smol, OUT / "labels", window=8, stride=8, limit=3)
signals = kvlens.observe(TRACES, smol, OUT / "signals", limit=3)
bands = kvlens.bands(labels, signals, OUT / "bands")
bands.documents["bands"]["verdict"]

# %% [markdown]
# Where no band was found nothing is exported: no policy can rest on it. The depths that the EpiKV paper published can
# be asked for by name, and so can any other method.

# %%
try:
    kvlens.export(bands, out=OUT / "own.json", budget_tokens=128)
except KvlensError as error:
    print(error)
epikv = kvlens.export(bands="paper", out=OUT / "epikv.json", budget_tokens=128, trigger="every:32")
epikv.document()

# %% [markdown]
# ## Under the policy
#
# `kvlens.apply` works on an ordinary `generate`. Evicted keys and values leave storage; positions stay those of the
# text. With `every:32` up to 32 tokens more than the budget are held between two evictions.

# %%
PROMPT = "Here is a long list of things that can be found in a harbour, each with a short explanation.\n\n1."
inputs = smol.tokenizer(PROMPT, return_tensors="pt")
cache = DynamicCache(config=smol.hf.config)
meters = {"policy": Meter(cache)}
asked_for = {"max_new_tokens": 320, "min_new_tokens": 320, "do_sample": False}
with kvlens.apply(OUT / "epikv.json", smol) as run:
    out = smol.hf.generate(
        **inputs,
        past_key_values=cache,
        streamer=meters["policy"],
        **asked_for,
    )
report, events = run.report(), run.events()
assert report.most_held <= 128 + 32
print(smol.tokenizer.decode(out[0, -60:]))
events.tail()

# %% [markdown]
# What it held at most, what its own tensors take (`side_bytes`), what the whole cache would take, and how much of the
# time went into scoring and evicting.

# %%
{name: value for name, value in vars(report).items() if name != "kept"}

# %% [markdown]
# ## Bytes as it writes
#
# The same without a policy, measured in the same way: every storage behind the cache, once.

# %%
full = DynamicCache(config=smol.hf.config)
meters["full cache"] = Meter(full)
smol.hf.generate(
    **inputs,
    past_key_values=full,
    streamer=meters["full cache"],
    **asked_for,
)
plots.stored_bytes({"full cache": meters["full cache"].bytes, "epikv, budget 128, every 32": meters["policy"].bytes})

# %% [markdown]
# ## A fact stated early
#
# A text of 600 tokens says a password near its beginning. It is read under each policy and cut to 200 tokens; only then
# comes the question. One text decides nothing: `experiments/05_needle.py` asks ten, at several budgets, and the README
# has the table.

# %%
documents = read_traces("../data/traces/documents.jsonl")[0].text
hay = smol.tokenizer(documents, add_special_tokens=False).input_ids
needle = smol.tokenizer("\n\nThe password of the blue gate is falcon.\n\n", add_special_tokens=False).input_ids
question = smol.tokenizer("\n\nThe password of the blue gate is", add_special_tokens=False).input_ids
text = torch.tensor([hay[:60] + needle + hay[60 : 600 - len(needle)]])
whole = torch.cat([text, torch.tensor([question])], 1)


def asked(scorer: str, budget: int, reduce: str = "all") -> str:
    """What the model answers under this budget, the text read and cut before it is asked."""
    policy = kvlens.Policy(
        scorer={"name": scorer},
        budget={"tokens": budget},
        protect={"sinks": 4, "recent": 32},
        trigger="prefill",
        reduce=reduce,
    )
    with kvlens.apply(policy, smol) as run, torch.inference_mode():
        smol.hf(text, use_cache=True)
        ones = torch.ones_like(whole)
        out = smol.hf.generate(
            whole, attention_mask=ones, past_key_values=run.cache, max_new_tokens=6, do_sample=False, pad_token_id=0
        )
    held = len([pos for pos in run.report().kept[0][0][0] if 60 <= pos < 60 + len(needle)])
    said = smol.tokenizer.decode(out[0, whole.shape[1] :])
    return f"{held:2} of {len(needle)} tokens of the fact held in layer 0: {said!r}"


print("full cache             ", asked("random", 1000))
for scorer in ("random", "sliding_window", "epikv", "keynorm", "surprise_fast", "value_var"):
    print(f"{scorer:15} 200 of 600", asked(scorer, 200))

# %% [markdown]
# ## Your turn
#
# 1. `reduce="head"` lets every head keep its own tokens (`keynorm`, `value_var`). Does the fact live longer?
# 2. Put the question before the cut (`trigger="prefill"` over the whole prompt). That is what "query-aware" means, and
#    why numbers of the two kinds are never compared.
# 3. `kvlens.export(kvlens.signals(labels, signals, OUT / "ranking"), ...)` makes a policy of the weights that fit your
#    own labels. What does its verdict say?
