# %% [markdown]
# # Which layers know?
#
# Labels say which cached tokens matter, and cost many forward passes. Signals are cheap: how far a token moved the
# residual stream, how surprising it was, how much attention it got. Here you ask whether a signal, in some contiguous
# layers (a *band*), goes with what matters, with statistics that do not find bands in noise.
#
# You will see
# 1. one pass of `observe` over the 28 traces whose labels ship with this repository (`evict`, one token a window);
# 2. `bands`: discovered on half of the traces, confirmed on the other, or not;
# 3. all signals ranked by what they add beyond position;
# 4. how far two interventions agree on what matters.
#
# The model is SmolLM2-135M (Q4_1, dequantised). The whole takes a minute or two on two CPU cores.

# %%
import tempfile
from pathlib import Path

import pandas as pd

import kvlens
from kvlens import model, plots, texts

DATA = Path("../data")
OUT = Path(tempfile.mkdtemp())  # name a folder of your own to keep the runs
smol = model.load("smollm2-135m", device="cpu", dtype="float32")
labels = kvlens.load(DATA / "labels")
traces = texts.read_traces(DATA / "traces" / "traces.jsonl")

# %% [markdown]
# ## Observe
#
# Every signal comes off one forward pass over prompt and reasoning. The target is never in the pass: several signals
# read the future, and would read the answer.

# %%
signals = kvlens.observe(traces, smol, OUT / "signals")
print(signals)
print(f"causal: {', '.join(signals.meta['config']['causal'])}")

# %% [markdown]
# ## Bands
#
# `hidden_change_rolling` is the mean over 64 tokens of how far the residual stream moved in each layer. In each trace:
# its rank correlation with the label over the reasoning tokens, position partialled out. The trace is the unit from
# there on.

# %%
bands = kvlens.bands(labels, signals, OUT / "bands")
found = bands.documents["bands"]
print(found["verdict"], "-", found["reason"])
pd.DataFrame(found["bands"]).drop(columns="stability", errors="ignore")

# %%
ax = plots.layer_profile(bands)

# %% [markdown]
# The raw signal follows the position, in some layers strongly. A label that follows it too would look predicted. The
# causal z-score takes most of that out, and partialling out position the rest:

# %%
ax = plots.position_trend(bands)

# %% [markdown]
# What papers show is the correlation of all tokens pooled over traces, with the trend over positions left in. Beside
# the per-trace means:

# %%
pd.DataFrame(found["layers"])[["layer", "mean_rho", "low", "high", "pooled_rho"]].iloc[::5]

# %% [markdown]
# ## All signals
#
# Each per-layer signal at the layer that half of the traces chose, its numbers from the other half. A filled dot is
# causal: a policy could use it while it decodes.

# %%
ranking = kvlens.signals(labels, signals, OUT / "ranking")
ax = plots.signal_ranking(ranking)

# %% [markdown]
# ## Does the label matter?
#
# The published bands rest on `substitute` (the text is replaced); eviction is `evict`. Four traces, windows of 32:

# %%
few = traces[:4]
runs = [kvlens.label(few, smol, OUT / kind, window=32, intervention=kind) for kind in ("evict", "substitute")]
agreement = kvlens.compare_labels(*runs, OUT / "agreement")
ax = plots.label_agreement(agreement)

# %% [markdown]
# ## Your turn
#
# 1. `kvlens.bands(labels, signals, OUT / "z", signal="hidden_change_z")`: does the z-score find what the mean found?
# 2. `run.documents["bands"]["traces"]` holds every trace's own correlations. Which traces disagree with the mean?
# 3. Label your own traces, forty or more, and look again: does the band stay?
