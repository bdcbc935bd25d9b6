"""Does this model, with these versions, do what every measurement rests on?

On 24 tokens, against the model's own plain forward pass, in log-probs:
1. unembed: hidden states taken through `unembed` give the model's own logits;
2. cached: 16 tokens, then 7, then 1, through a growing cache, give the same;
3. no-op: a 4-D mask that hides nothing changes nothing;
4. mask: hiding four cached keys by a 4-D mask moves the result, and to where deleting their rows moves it;
5. override: plain causal attention put in the backend's place, the prefix kept outside the cache, gives the same.

Two public tools give silently wrong numbers today for want of such a check. A mask that is not honoured is recorded and
refused only where one is needed; everything else is refused at once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.attention import (
    attention_override,
    cache_from,
    cache_layers,
    layer_masks,
    new_cache,
    private_cache,
)
from kvlens.cached import cache_dir
from kvlens.causal_lm import Model, SelfCheck
from kvlens.errors import ModelRefused
from kvlens.forward import logits, wrap
from kvlens.provenance import versions
from kvlens.weights import recall, remember

N_PREFIX, N_TOKENS = 16, 24
HIDDEN = slice(12, 16)
# Root mean square over the vocabulary of a log-prob row's error; SmolLM2 shows a third of these and less.
TOLERANCE_NATS = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


def checked(model: Model, *, keep: bool = False) -> SelfCheck:
    """The self-check's result, all of it right but perhaps the mask; with `keep`, through the cache folder.

    Raises: ModelRefused naming what failed, by how much, and the versions.
    """
    key = _verdict_key(model)
    kept = recall(key) if keep else None
    if isinstance(kept, dict) and set(kept) == {field.name for field in fields(SelfCheck)}:
        return SelfCheck(**kept)
    result = self_check(model)
    failed = _failed(model, result)
    if failed:
        why = f" ({result.reason})" if result.reason else ""
        raise ModelRefused(
            f"{model.name}: self-check failed: {', '.join(failed)}{why}; tolerance {result.tolerance_nats:g}; "
            + ", ".join(f"{name} {version}" for name, version in versions().items() if version),
            "use the versions in constraints.txt, --attention eager, or another model",
        )
    if keep:
        remember(key, asdict(result))
    return result


def _failed(model: Model, result: SelfCheck) -> list[str]:
    """What is wrong enough to refuse the model; FlashAttention takes no 4-D mask, so its no-op says nothing."""
    parts = ["unembed", "cached", "override"] + ["noop"] * (not model.attention.startswith("flash"))
    return [
        f"{part} off by {getattr(result, f'{part}_nats'):.2g} nats"
        for part in parts
        if not getattr(result, f"{part}_ok")
    ]


@torch.no_grad()
def self_check(model: Model) -> SelfCheck:
    """What the five checks of this file found; raises nothing on a mismatch.

    Raises: ModelRefused for a model that cannot run on as many tokens as the checks need.
    Cost: a dozen forward passes of at most 24 tokens, a second for a model of 135M parameters on a CPU.
    """
    if model.max_context < N_TOKENS:
        raise ModelRefused(
            f"{model.name}: a context of {model.max_context} tokens is too short to check it on {N_TOKENS}",
            "use a model with a longer context",
        )
    tolerance = TOLERANCE_NATS.get(model.dtype, TOLERANCE_NATS[torch.float32])
    found: dict[str, float] = {}
    reason = ""
    ids = (torch.arange(N_TOKENS, device=model.device)[None] * 7919 + 11) % model.d_vocab
    steps: dict[str, Callable[[Tensor], float]] = {
        "unembed": lambda truth: _apart(logits(model, ids), truth),
        "cached": lambda truth: _apart(_cached(model, ids), truth),
        "noop": lambda truth: _apart(logits(model, ids, mask=_causal(ids)), truth),
        "mask": lambda _: _apart(_masked(model, ids), _deleted(model, ids)),
        "moved": lambda truth: _apart(_masked(model, ids), truth[:, N_PREFIX:]),
        "override": lambda truth: _apart(_overridden(model, ids), truth[:, N_PREFIX:]),
    }
    truth = _plain(model, ids)
    for name, step in steps.items():
        try:
            found[name] = step(truth)
        except Exception as error:  # whatever a foreign model raises is a finding, not a crash
            found[name] = torch.inf
            reason = reason or f"{name}: {type(error).__name__}: {error}".splitlines()[0]
    ok = {name: value <= tolerance for name, value in found.items()}
    return SelfCheck(
        cached_ok=ok["cached"],
        mask_ok=ok["mask"] and ok["noop"] and 2 * tolerance < found["moved"] < torch.inf,
        noop_ok=ok["noop"],
        unembed_ok=ok["unembed"],
        override_ok=ok["override"],
        cached_nats=found["cached"],
        mask_nats=found["mask"],
        moved_nats=found["moved"],
        noop_nats=found["noop"],
        unembed_nats=found["unembed"],
        override_nats=found["override"],
        tolerance_nats=tolerance,
        reason=reason,
    )


def _plain(model: Model, ids: Int[Tensor, "batch query"]) -> Float[Tensor, "batch query d_vocab"]:
    """The model's own logits, by the plainest call there is."""
    try:
        logits_of: Tensor = model.hf(input_ids=ids, use_cache=False).logits.float()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ModelRefused(
            f"{model.name} fails on {N_TOKENS} tokens: {type(error).__name__}: {error}".splitlines()[0],
            "use a whole model with the config.json that came with it",
        ) from error
    return logits_of


def hooks_bite(model: Model) -> bool:
    """Whether hiding a key through hooks on the attention modules moves the logits, and removing them undoes it."""
    ids = (torch.arange(8, device=model.device)[None] * 7919 + 11) % model.d_vocab
    mask = _causal(ids)
    mask[..., 2:, 1] = False
    with torch.no_grad():
        before = logits(model, ids)
        with layer_masks(model, dict.fromkeys(range(model.n_layers), mask)):
            inside = logits(model, ids)
        after = logits(model, ids)
    return bool(torch.equal(before, after)) and _apart(inside, before) > TOLERANCE_NATS[torch.float32]


def doctor_facts() -> dict[str, Any]:
    """What decides how kvlens runs here: versions, device and memory, attention backends, cache folder, hooks.

    Cost: under a second; one tiny random model is built in memory.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    cuda = torch.cuda.is_available()
    flash = importlib.util.find_spec("flash_attn") is not None
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tiny = LlamaForCausalLM(config)
    folder = cache_dir()
    return {
        **versions(),
        "device": torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} threads",
        "memory_bytes": torch.cuda.mem_get_info()[1]
        if cuda
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "free_bytes": torch.cuda.mem_get_info()[0]
        if cuda
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"),
        "attention": [
            "sdpa",
            "eager",
            *(["flex_attention"] if cuda else []),
            *(["flash_attention_2"] if cuda and flash else []),
        ],
        "flash_attn": flash,
        "cache_dir": str(folder),
        "cache_writable": os.access(_nearest(folder), os.W_OK),
        "hooks_bite": hooks_bite(wrap(tiny)),
    }


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest parent that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _verdict_key(model: Model) -> str:
    """The name under which the verdict on this model under these circumstances is kept."""
    circumstances = {
        **versions(),
        "dtype": str(model.dtype),
        "device": model.device.type,
        "attention": model.attention,
        "class": f"{type(model.hf).__module__}.{type(model.hf).__qualname__}",
    }
    digest = hashlib.sha256(json.dumps(circumstances, sort_keys=True).encode()).hexdigest()[:16]
    return f"verdict-{model.fingerprint}-{digest}"


def _apart(ours: Float[Tensor, "batch rows d_vocab"], truth: Float[Tensor, "batch rows d_vocab"]) -> float:
    """The largest over rows of the root mean square over the vocabulary of the difference in log-probs, in nats."""
    return float((ours.log_softmax(-1) - truth.log_softmax(-1)).square().mean(-1).sqrt().max())


def _causal(ids: Int[Tensor, "batch query"]) -> Bool[Tensor, "one one query query"]:
    """The visibility that hides nothing from a causal model."""
    n_tokens = ids.shape[1]
    return torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=ids.device).tril()[None, None]


def _cached(model: Model, ids: Int[Tensor, "batch query"]) -> Float[Tensor, "batch query d_vocab"]:
    """Logits of all tokens, through a growing cache in three steps."""
    cache = new_cache(model)
    pieces = ids.split([N_PREFIX, N_TOKENS - N_PREFIX - 1, 1], dim=1)
    return torch.cat([logits(model, piece, cache=cache) for piece in pieces], dim=1)


def _masked(model: Model, ids: Int[Tensor, "batch query"]) -> Float[Tensor, "batch rows d_vocab"]:
    """Logits after the prefix, the keys in `HIDDEN` hidden from these rows by a mask."""
    mask = _causal(ids)
    mask[..., N_PREFIX:, HIDDEN] = False
    return logits(model, ids, mask=mask)[:, N_PREFIX:]


def _deleted(model: Model, ids: Int[Tensor, "batch query"]) -> Float[Tensor, "batch rows d_vocab"]:
    """The same, the rows in `HIDDEN` taken out of the cache, positions kept."""
    cache = new_cache(model)
    logits(model, ids[:, :N_PREFIX], cache=cache, last=1)
    left = [pos for pos in range(N_PREFIX) if pos not in range(N_PREFIX)[HIDDEN]]
    shorter = cache_from(model, [(keys[:, :, left], values[:, :, left]) for keys, values in cache_layers(cache)])
    positions = torch.arange(N_PREFIX, N_TOKENS, device=ids.device)[None]
    mask = key_positions = None
    if any(model.sliding):  # a full layer needs no mask here, a sliding one must be told where its keys stand
        key_positions = torch.tensor([[*left, *range(N_PREFIX, N_TOKENS)]], device=ids.device)
        mask = _causal(ids)[..., N_PREFIX:, key_positions[0]]
    rest = ids[:, N_PREFIX:]
    return logits(model, rest, positions=positions, cache=shorter, mask=mask, key_positions=key_positions)


def _overridden(model: Model, ids: Int[Tensor, "batch query"]) -> Float[Tensor, "batch rows d_vocab"]:
    """Logits after the prefix, its keys and values handed to the override instead of the cache."""
    cache = new_cache(model)
    logits(model, ids[:, :N_PREFIX], cache=cache, last=1)
    prefix = dict(zip(map(id, model.layers), cache_layers(cache), strict=True))

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, **extra: Any
    ) -> tuple[Tensor, None]:
        keys, values = prefix[id(module)]
        return plain_attention(query, torch.cat([keys, key], 2), torch.cat([values, value], 2), **extra), None

    with attention_override(model, attend):
        return logits(model, ids[:, N_PREFIX:], cache=private_cache(model, N_PREFIX))


def plain_attention(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    value: Float[Tensor, "batch kv_head key d_head"],
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " head"] | None = None,
    **_: Any,
) -> Float[Tensor, "batch query head d_head"]:
    """Causal attention written out in float32, the queries being the last tokens; keywords named as in transformers."""
    repeats = query.shape[1] // key.shape[1]
    keys, values = (states.float().repeat_interleave(repeats, 1) for states in (key, value))
    scores = query.float() @ keys.mT * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    n_query, n_key = scores.shape[-2:]
    index = torch.arange(n_key, device=query.device)
    distance = index[n_key - n_query :, None] - index[None]
    scores = scores.masked_fill((distance < 0) | (distance >= (sliding_window or n_key)), -torch.inf)
    if s_aux is not None:  # one more logit per head, which takes mass and gives no value
        sink = s_aux.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., :n_key]
    return (weights @ values).to(query.dtype).transpose(1, 2).contiguous()
