# %% [markdown]
# # Does the future say which tokens to keep?
#
# *Counter-causal surprise* runs the model over its cache again, each token seeing only what comes **after** it. A token
# that its future predicts well can go, says the paper; one that surprises the future stays. Two things are asked here:
# does the score tell which tokens matter, and does it measure the future at all?
#
# You will see
# 1. the score of every token of two texts, and what a shrinking cache would keep;
# 2. what a pass over the whole model and the fast pass over its last block agree on;
# 3. the controls: the same score from the past, and how often a token is used at all;
# 4. what occlusion labels say.
#
# The whole takes about a minute on two CPU cores; `experiments/04_surprise.py` asks a hundred traces, with intervals.

# %%
import tempfile
from pathlib import Path

import numpy as np
import torch

import kvlens
from kvlens import model, plots
from kvlens.observables.counter_causal import Sight
from kvlens.stats import partial_spearman, spearman
from kvlens.surprise_facts import by_variant

TRACES = Path("../data/traces/traces.jsonl")
OUT = Path(tempfile.mkdtemp())  # name a folder of your own to keep the runs
smol = model.load("smollm2-135m", device="cpu", dtype="float32")

# %% [markdown]
# ## Who sees whom
#
# Five cached tokens, a gap of one: each row sees the columns that are 1. The last two have no future to see, so they
# have no score, and a cache always keeps them.

# %%
sight = Sight(torch.arange(5)[None], min_gap=1)
print((~sight.hidden(0, 5, 0, 5, None))[0, 0].int().numpy())
print("has a score:", sight.known()[0].tolist())

# %% [markdown]
# ## Two texts
#
# `full` runs every block, `fast` the last block without its MLP, from states that the forward pass left behind; `past`
# turns a pass round. With a budget of 64 tokens, refreshed every 16, the text goes through a cache that really shrinks.

# %%
VARIANTS = ["full", "fast", "full,logprob,no_self", "full,past", "fast,past"]
run = kvlens.surprise(TRACES, smol, OUT / "surprise", variants=VARIANTS, budget=64, every=16, limit=2)
assert (run.refreshes.groupby(["trace_id", "variant", "refresh"]).kept.sum() <= 64 + 4).all()
by_variant(run)

# %%
kvlens.show(run)

# %%
ax = plots.kept_tokens(run, variant="fast")

# %%
ax = plots.score_staleness(run)

# %% [markdown]
# ## Is it the future?
#
# If a score measured what the future says, its mirror image, taken from the past, would be another score. Here is how
# far each goes with its mirror, and how far with the rarity of the token alone.

# %%
trace = run.traces.trace_id[0]
table = run.scores[run.scores.trace_id == trace].pivot(index="pos", columns="variant", values="score")
ids = run.tokens[run.tokens.trace_id == trace].set_index("pos").token_id
rarity = -np.log(run.tokens.token_id.value_counts().reindex(ids).to_numpy())
for name in ("full", "fast"):
    both = table[[name, f"{name},past"]].notna().all(axis=1).to_numpy()
    own, mirror = (table[column].to_numpy()[both] for column in (name, f"{name},past"))
    print(
        f"{name}: with its mirror {spearman(own[:, None], mirror)[0]:+.2f}, "
        f"with rarity {spearman(own[:, None], rarity[both])[0]:+.2f}"
    )

# %% [markdown]
# ## Does it tell which tokens matter?
#
# `data/labels` holds how much the target loses when a token is evicted. Rank correlations of each variant, position and
# token frequency partialled out, in these two texts. Two texts decide nothing: see "What was measured" in the README.

# %%
labels = kvlens.load("../data/labels").tokens
for trace in run.traces.trace_id:
    effects = labels[labels.trace_id == trace].set_index("pos").effect_nats
    table = run.scores[run.scores.trace_id == trace].pivot(index="pos", columns="variant", values="score")
    ids = run.tokens[run.tokens.trace_id == trace].set_index("pos").token_id
    count = run.tokens.token_id.value_counts().reindex(ids).to_numpy(dtype=float)
    print(trace)
    for name in VARIANTS:
        known = table[name].notna().to_numpy() & effects.reindex(table.index).notna().to_numpy() & (table.index > 0)
        score, effect = table[name].to_numpy()[known, None], effects.reindex(table.index).to_numpy()[known]
        rho = partial_spearman(score, effect, np.flatnonzero(known), controls=np.log(count)[known, None])[0]
        print(f"  {name:24} {rho:+.2f}")

# %% [markdown]
# ## Your turn
#
# 1. `variants=["full,clause", "full,sentence"]` scores whole clauses and sentences. Which does the cache keep then?
# 2. `gap=32` hides the next 32 tokens as well. Does the score change where the text repeats itself?
# 3. `kvlens.observe(..., signals="surprise_fast,key_norm")` puts the score beside other signals, for `kvlens signals`.
