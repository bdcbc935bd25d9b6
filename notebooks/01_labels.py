# %% [markdown]
# # Which cached tokens matter?
#
# A language model answers out of its cache: a key and a value for every token it has read. Here you hide windows of
# that cache from a small model, one at a time, and see how much less probable the right answer becomes.
#
# You will see
# 1. the tokens that one worked problem rests on, as a table, as tinted text and as a figure;
# 2. whether two ways of hiding a window, `evict` and `knockout`, agree on what matters;
# 3. the same trace through TransformerLens: the same number by its hooks, and which heads look at the window.
#
# The model is SmolLM2-135M (Q4_1, dequantised); the first run on a machine fetches it. The rest takes about half a
# minute on two CPU cores.

# %%
import tempfile
from pathlib import Path

import numpy as np

import kvlens
from kvlens import lens, model, plots, texts

TRACES = Path("../data/traces/traces.jsonl")
OUT = Path(tempfile.mkdtemp())  # name a folder of your own to keep the runs: the same call then finds its labels there
smol = model.load("smollm2-135m", device="cpu", dtype="float32")

# %% [markdown]
# ## Label a trace
#
# A trace is a prompt, a worked reasoning, and a *target*: the closing sentence. The target is never hidden. It is what
# the model's probability is asked for.
#
# Windows of four tokens keep this quick; `window=1` gives every token a label of its own. An effect is
# `log p(target | everything) - log p(target | the window hidden)`, in nats: positive means that the target needs it.

# %%
trace = next(trace for trace in texts.read_traces(TRACES) if trace.id == "night-bus")
print(trace.prompt + trace.reasoning, trace.target, sep="\n--- target:")
evict = kvlens.label([trace], smol, OUT / "evict", window=4)
kvlens.inspect(evict, n=12)

# %% [markdown]
# One row is one window. The first is missing from the table on purpose: position 0 is an attention sink, where many
# heads park their attention, so hiding it hurts whatever it says.
#
# Below, the same as text: orange for what the target needs, blue for what it is better without, and the values on
# hover; the four tokens of a window share its value. Then along the positions. The grey band around 0 is the noise
# floor, how far an effect moves when nothing but the way of computing it changes; it may be thinner than the line.

# %%
kvlens.show(evict, trace.id)

# %%
ax = plots.token_effects(evict, trace.id)

# %% [markdown]
# ## Evict or knock out?
#
# `evict` drops the window at the end of the context: later tokens have read it before, and what they took from it is
# still in the cache. `knockout` hides it from every later token, so that this road is closed too. Do they rank the
# windows alike? The window of position 0 is left out of both.

# %%
knockout = kvlens.label([trace], smol, OUT / "knockout", window=4, intervention="knockout")

both = evict.windows.merge(knockout.windows, on=["window_start", "window_end"], suffixes=("_evict", "_knockout"))
both = both[both.window_start > 0]
agreement = both.effect_nats_evict.corr(both.effect_nats_knockout, method="spearman")
print(f"rank correlation over the {len(both)} windows of this one trace: {agreement:.2f}")

# %% [markdown]
# ## The same trace through TransformerLens
#
# `open_lens` wraps a copy of the model. `evict` then hides the window with hooks, in full forward passes, and has to
# arrive at the number of the label run.
#
# After that: which heads look at the window while the target is read? TransformerLens caches the attention patterns;
# hiding the window in these heads alone, and in all the others, says how much of the effect is theirs.

# %%
tokens = texts.tokenize(trace, smol.tokenizer)
tl = lens.open_lens(smol)

top = evict.windows.query("window_start > 0").nlargest(1, "effect_nats").iloc[0]
start, end = window = (int(top.window_start), int(top.window_end))
by_hooks = tl.evict(tokens, window).effect_nats
text = tokens.text[tokens.char_spans[start][0] : tokens.char_spans[end - 1][1]]
print(f"positions {start} to {end - 1}, {text!r}: {top.effect_nats:.4f} nats by kvlens, {by_hooks:.4f} by hooks")
assert abs(by_hooks - top.effect_nats) < 1e-3

# %%
_, cache = tl.run_with_cache(tokens, lambda name: name.endswith("attn.hook_pattern"))
patterns = [cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(smol.n_layers)]  # [1, head, query, key]
# Each head's largest attention to the window, over the queries that `evict` hides it from.
looks = np.stack([p[0, :, tokens.n_context - 1 :, start:end].sum(-1).amax(-1).numpy() for p in patterns])

cells = looks >= np.sort(looks, axis=None)[-20]  # [layer, head]: the 20 heads that look at it most
for layer, head in np.argwhere(cells)[:5]:
    print(f"layer {layer} head {head}: up to {looks[layer, head]:.0%} of its attention")
print(f"hidden in those {cells.sum()} heads: {tl.evict(tokens, window, cells).effect_nats:+.2f} nats")
print(f"hidden in the other {(~cells).sum()}: {tl.evict(tokens, window, ~cells).effect_nats:+.2f} nats")

# %% [markdown]
# ## Your turn
#
# 1. Negative effects are common. Find the window without which the target gains most, and read it in its context. Does
#    `knockout` agree that it does harm?
# 2. `leaking-trough` holds a wrong turn that is corrected. Label it: do the wrong steps still matter to the target?
# 3. `intervention="substitute"` replaces the text itself instead of hiding it. Which windows move up, and why?

# %%
both.nsmallest(3, "effect_nats_evict")[["window_start", "window_end", "effect_nats_evict", "effect_nats_knockout"]]
