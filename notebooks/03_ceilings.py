# %% [markdown]
# # How much could any selection gain?
#
# A cache that keeps some keys and lets softmax share out the rest's weight (*forced weights*) makes an error in every
# attention row. Most rules keep keys with large weights. How much better could the best choice be? Here it is found
# exactly, inside a pool of candidates, and every number stands beside the same number for values that have nothing to
# do with the weights.
#
# You will see
# 1. one row by hand: the error of a kept set, and the best set by trying all;
# 2. a run over every layer and head of SmolLM2-135M (Q4_1, dequantised), on a few rows of two documents;
# 3. the nulls, which decide what "a ceiling of 5 %" or "an AUC of .8" means;
# 4. what rules, shared sets and free weights cost or gain.
#
# The whole takes about a minute on two CPU cores; `experiments/03_ceilings.py` is the same with thirteen thousand rows.

# %%
import tempfile
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

import kvlens
from kvlens import model, plots
from kvlens.discover.hardness import can_be_parted, from_partition, zero_error_possible
from kvlens.discover.instances import forced_weight_error

DOCUMENTS = Path("../data/traces/documents.jsonl")
OUT = Path(tempfile.mkdtemp())  # name a folder of your own to keep the runs
smol = model.load("smollm2-135m", device="cpu", dtype="float32")

# %% [markdown]
# ## One row by hand
#
# Four keys with weights $p$ and values $v$ in the plane. Keeping a set $A$ gives the mean of its values under the
# weights that are left, and the error is how far that is from the full output. The two largest weights, keys 0 and 1,
# are not the best pair: keys 0 and 3 come closer, and so do keys 1 and 2, which balance each other.

# %%
p = np.array([[0.45, 0.25, 0.22, 0.08]])
v = np.array([[3.0, 0.0], [0.0, 2.0], [4.0, -2.0], [0.0, 0.0]])
for kept in combinations(range(4), 2):
    keep = np.isin(np.arange(4), kept)[None]
    print(kept, f"{forced_weight_error(p, v, keep)[0]:.3f}")

# %% [markdown]
# Finding the best set is hard in general: a list of numbers can be split into two halves of equal sum exactly when some
# kept set of a row made from it has no error at all.

# %%
for numbers in ([3, 1, 1, 2, 2, 1], [3, 1, 1, 2, 2, 2], [5, 1, 1, 1]):
    print(numbers, can_be_parted(numbers), zero_error_possible(from_partition(numbers)))

# %% [markdown]
# ## Every layer and head
#
# Rows are read off the model's own attention and checked against what it put out. The search is exact over a pool: the
# largest weights, and the keys whose weight and value matter most outside of them.

# %%
run = kvlens.ceilings(DOCUMENTS, smol, OUT / "ceilings", limit=2, rows_per_head=1)
summary = run.documents["summary"]
print(run)
print(summary["check"])
rows = run.rows
assert (rows.best_error <= rows.balanced_error + 1e-12).all()
rows.groupby("budget")[["ceiling", "kappa", "dropped_mass", "effective_rank"]].median()

# %% [markdown]
# ## What the nulls say
#
# `permuted` deals the row's own values out anew, `gaussian` draws them with the same mean and covariance, `rank 4` from
# its four leading directions. Where a null has the same ceiling, a small ceiling is no achievement of the model: a sum
# of many independent vectors is hard to balance whatever they mean. The AUC of dropped mass is high for them too.

# %%
ax = plots.ceiling_distribution(run)

# %%
ax = plots.dropped_mass_auc(run)

# %%
pd.DataFrame(summary["predictors"])[["statistic", "auc", "low", "high", "within_cells_auc"]]

# %% [markdown]
# ## Where there is room, and what rules leave
#
# A cell (layer, head) is *flat* where the eight largest weights drop more than a quarter of the mass. Rules that do not
# look at the weights leave several times the best error; the largest weights a few per cent.

# %%
ax = plots.cell_map(run)

# %%
ax = plots.rule_excess(run)

# %% [markdown]
# Weights that could be chosen freely, for the same number of keys, would gain far more than choosing keys does:

# %%
ax = plots.free_weights(run)

# %% [markdown]
# ## Your turn
#
# 1. `run.rows` has every error. In which layers is `kappa` infinite or largest, and is `dropped_mass` large there?
# 2. `kvlens.ceilings(..., cross_entropy=True)` runs the model on eight keys a row in the flat cells. Does it notice?
# 3. Try documents of your own, and `rows_per_head=6`: how wide are the intervals over documents then?
