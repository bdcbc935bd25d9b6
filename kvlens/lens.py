"""How is the same eviction seen, and done, with TransformerLens' hooks?

1. `open_lens` wraps a copy of the loaded model with TransformerBridge, which re-implements its attention and has no
   way back: the label engine's own model stays as it is;
2. it probes at load what an edit through `blocks.{layer}.attn.hook_attn_scores` does: the hook fires in every layer,
   the logits move after the hidden key and nowhere else; a hook that is accepted and does nothing is refused;
3. `Lens.evict` hides a window's key columns there from the last context token and the target: the label engine's
   number by another road. Forward passes run without a cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import model as models
from kvlens.errors import EnvironmentLacks, InputError, ModelRefused
from kvlens.model import Model
from kvlens.provenance import versions
from kvlens.records import Tokens
from kvlens.segmenting import check_window
from kvlens.selfcheck import TOLERANCE_NATS
from kvlens.wording import extra

SCORES = "blocks.{layer}.attn.hook_attn_scores"
TRANSFORMERS_TOO_NEW = (5, 24)
NamesFilter = str | Sequence[str] | Callable[[str], bool]
Hook = tuple[str, Callable[..., Tensor]]


@dataclass(frozen=True)
class Evicted:
    """What hiding a window through hooks gave: the effect in nats, and log p of each target token in nats."""

    effect_nats: float
    log_probs: Float[np.ndarray, " target"]


@dataclass(frozen=True, eq=False, repr=False)
class Lens:
    """A model under TransformerLens; `bridge` is its TransformerBridge, for everything this class does not wrap."""

    model: Model
    bridge: Any

    def __repr__(self) -> str:
        return f"<Lens of {self.model.name}: {self.model.n_layers} layers, hooks in lens.bridge.hook_dict>"

    def log_probs(self, tokens: Tokens, hooks: Sequence[Hook] = ()) -> Float[np.ndarray, " target"]:
        """Log p of each target token in nats, under these hooks. Cost: one forward pass over the whole trace."""
        logits = self.logits(self._ids(tokens), hooks)[0, tokens.n_context - 1 :]
        targets = torch.from_numpy(tokens.ids[tokens.n_context :]).to(logits.device)
        chosen = logits.double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        return chosen.cpu().numpy()

    def evict(
        self, tokens: Tokens, window: tuple[int, int], cells: Bool[np.ndarray, "layer head"] | None = None
    ) -> Evicted:
        """The effect of evicting [start, end) at the end of the context, in the (layer, head) cells, None being all.

        Cost: two forward passes over the whole trace.
        """
        check_window(tokens, window)
        hidden = self.log_probs(tokens, self.hiding(window, tokens.n_context - 1, cells))
        return Evicted(float((self.log_probs(tokens) - hidden).sum()), hidden)

    def hiding(
        self, window: tuple[int, int], cut: int, cells: Bool[np.ndarray, "layer head"] | None = None
    ) -> list[Hook]:
        """Hooks that hide the keys [start, end) from queries at positions >= `cut`, for the bridge's `fwd_hooks`.

        Both count tokens of the trace; `cells` None is every layer and head.
        """
        shape = (self.model.n_layers, self.model.n_heads)
        if cells is None:
            cells = np.ones(shape, dtype=bool)
        elif cells.shape != shape:
            raise InputError(
                f"cells of shape {cells.shape}: {self.model.name} has {shape[0]} layers of {shape[1]} heads"
            )
        return [
            (SCORES.format(layer=layer), _hide(slice(*window), cut, np.flatnonzero(heads).tolist()))
            for layer, heads in enumerate(cells)
            if heads.any()
        ]

    @torch.no_grad()
    def run_with_cache(self, tokens: Tokens, names: NamesFilter) -> tuple[Float[Tensor, "1 query d_vocab"], Any]:
        """The logits of a trace and the activations at the hooks that `names` picks, as TransformerLens caches them.

        `names` is one hook name, several, or a function of the name. Every activation of a long trace is gigabytes
        (scores and patterns are query x key for every head), so something must be picked.
        """
        picked = [names] if isinstance(names, str) else names if callable(names) else list(names)
        asked = [] if callable(picked) else picked
        cache: Any = {}
        # The bridge refuses names of which none is a hook; it passes over unknown ones among others.
        with suppress(KeyError) if asked else nullcontext():
            logits, cache = self.bridge.run_with_cache(self._ids(tokens), names_filter=picked, use_cache=False)
        missing = [name for name in asked if name not in cache]
        if missing or not len(cache):
            raise InputError(
                f"no activation was caught at {', '.join(missing) or 'any hook the function was asked about'}",
                "lens.bridge.hook_dict lists the names; some hooks only fire when switched on",
            )
        return logits, cache

    @torch.no_grad()
    def logits(self, ids: Int[Tensor, "1 query"], hooks: Sequence[Hook]) -> Float[Tensor, "1 query d_vocab"]:
        """The logits of these tokens under these hooks. Cost: one forward pass."""
        return self.bridge.run_with_hooks(ids, fwd_hooks=list(hooks), use_cache=False)

    def _ids(self, tokens: Tokens) -> Tensor:
        return torch.from_numpy(tokens.ids[:-1]).to(self.model.device)[None]


def open_lens(model: Model) -> Lens:
    """The model under TransformerLens: a copy of it, the given one stays untouched.

    Raises: EnvironmentLacks without transformer-lens or with a transformers it is silently wrong on; InputError for a
        model without a tokenizer; ModelRefused where TransformerBridge does not know the architecture, computes other
        logits than the model, or hooks do not bite.
    Cost: a second copy of the weights and a few forward passes of eight tokens.
    """
    _check_versions()
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError as error:
        raise EnvironmentLacks("the lens needs transformer-lens", extra("lens")) from error
    if model.tokenizer is None:
        raise InputError(
            f"{model.name} has no tokenizer, and TransformerBridge fetches one by name when it gets none",
            "give one: kvlens.model.wrap(hf_model, tokenizer)",
        )
    hf_model = copy.deepcopy(model.hf)
    kind = type(hf_model).__name__
    hf_model.config.architectures = [kind]  # unset in models made from a config, and what the bridge goes by
    try:
        bridge = TransformerBridge.boot_transformers(
            model.name,
            hf_model=hf_model,
            tokenizer=_as_it_is(model.tokenizer, model.name),
            dtype=model.dtype,
            device=model.device,
        )
    except (ValueError, NotImplementedError, AttributeError) as error:
        raise ModelRefused(
            f"TransformerBridge cannot wrap {model.name} ({kind}): {str(error).split('. ')[0][:200]}",
            "labels do not need it; the lens does",
        ) from error
    lens = Lens(model, bridge)
    _check_hooks_bite(lens)
    return lens


def _check_versions() -> None:
    """Nothing; raises on a transformers whose results TransformerLens changes without a word."""
    installed = versions()["transformers"]
    if tuple(int(part) for part in installed.split(".")[:2]) >= TRANSFORMERS_TOO_NEW:
        raise EnvironmentLacks(
            f"transformers {installed} with transformer-lens: cached logits are silently wrong from 5.24 on",
            "pip install 'transformers<5.24'",
        )


def _as_it_is(tokenizer: Any, name: str) -> Any:
    """A copy of the tokenizer that TransformerBridge keeps instead of fetching another one by its name.

    It would load the tokenizer again to have a BOS token added; kvlens passes token ids, so nothing needs adding.
    """
    own = copy.deepcopy(tokenizer)
    own.init_kwargs = {"name_or_path": name, **own.init_kwargs, "add_bos_token": True}
    return own


def _check_hooks_bite(lens: Lens) -> None:
    """Nothing; raises where the bridge's logits are not the model's, or an edit of the scores does nothing."""
    model, bridge = lens.model, lens.bridge
    ids = (torch.arange(8, device=model.device)[None] * 7919 + 11) % model.d_vocab
    cut, tolerance = 2, TOLERANCE_NATS.get(model.dtype, TOLERANCE_NATS[torch.float32])
    fired: set[str] = set()

    def seen(scores: Tensor, hook: Any) -> Tensor:
        fired.add(str(hook.name))
        return scores

    hooks = lens.hiding((1, 2), cut)
    with torch.no_grad():
        truth = models.logits(model, ids)
        plain = bridge.run_with_hooks(ids, fwd_hooks=[(name, seen) for name, _ in hooks], use_cache=False).float()
        hidden = bridge.run_with_hooks(ids, fwd_hooks=hooks, use_cache=False).float()
    apart, moved, leaked = (
        float((a.log_softmax(-1) - b.log_softmax(-1)).square().mean(-1).sqrt().max())
        for a, b in ((plain, truth), (hidden[:, cut:], plain[:, cut:]), (hidden[:, :cut], plain[:, :cut]))
    )
    wrong = []
    if apart > tolerance:
        wrong.append(f"its logits are {apart:.2g} nats off the model's")
    if len(fired) < model.n_layers:
        wrong.append(f"hook_attn_scores fires in {len(fired)} of {model.n_layers} layers")
    if moved <= TOLERANCE_NATS[torch.float32]:
        wrong.append("hiding a key at hook_attn_scores does not move the logits")
    if leaked > tolerance:
        wrong.append(f"hiding a key moves earlier logits by {leaked:.2g} nats")
    if wrong:
        found = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
        raise ModelRefused(
            f"{model.name} under TransformerBridge: {'; '.join(wrong)} ({found})",
            "use the versions in constraints.txt, or label without the lens",
        )


def _hide(keys: slice, cut: int, heads: Sequence[int]) -> Callable[..., Tensor]:
    """A hook that hides key columns from the queries at positions >= `cut` in these heads."""

    def hook(scores: Float[Tensor, "batch head query key"], **_: Any) -> Float[Tensor, "batch head query key"]:
        edited = scores.clone()
        edited[:, heads, cut:, keys] = torch.finfo(scores.dtype).min
        return edited

    return hook
