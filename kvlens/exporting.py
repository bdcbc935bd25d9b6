"""How does a finding become a policy file?

1. A source says which method scores, with which parameters (policy_sources.py).
2. What the method's paper protects is the default (`usual`); every other field says itself, or keeps the policy's
   default. All parameters are spelt out, so that a default that changes later changes no file.
3. The model block comes from `model`, else from the run; the evidence is the source's SHA-256 and headline numbers.
4. The policy is checked in the form in which the file holds it, then written.

A run whose verdict is "no band" exports nothing: VerdictNo, exit 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvlens import __version__
from kvlens.causal_lm import Model
from kvlens.disk import as_path
from kvlens.errors import InputError
from kvlens.loading import Run
from kvlens.policy import Allocate, Budget, ScorerChoice
from kvlens.policy_file import SCHEMA, PolicyFile, read_policy, write_policy
from kvlens.policy_sources import Origin, origin, refuse_source
from kvlens.provenance import now, plain

DEFAULT_TOKENS = 512


def export(
    source: Run | str | Path | None = None,
    out: str | Path = "policy.json",
    *,
    bands: str | None = None,
    scorer: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    model: str | Path | Model | None = None,
    sinks: int | None = None,
    recent: int | None = None,
    protect_prompt: bool | None = None,
    trigger: str | None = None,
    page_size: int | None = None,
    storage: str | None = None,
    allocate: str | Mapping[str, Any] | None = None,
    reduce: str | None = None,
    budget_tokens: int | None = None,
    budget_bytes: int | None = None,
    keep_fraction: float | None = None,
    program: str | Path | None = None,
    force: bool = False,
) -> PolicyFile:
    """The policy that the file `out` holds afterwards.

    Args:
        source: a bands run or its `bands.json`, or a run of `kvlens.signals` or its `fitted.json`.
        bands: "paper" takes the published depths instead.
        scorer: the method where no source says it, or another one that takes two depths or two bands.
        parameters: of the method; they go before the source's.
        model: fills the model block: layers, KV heads, head width, fingerprint.
        page_size: evict whole pages of so many positions.
        allocate: a name, or `{"name": ..., "parameters": {...}}`, or `{"name": "table", "table": [[...], ...]}`, a
            budget for every layer and KV head. One that reads scores brings reduce "head" and storage "ragged".
        budget_tokens, budget_bytes, keep_fraction: one of them; 512 tokens where none is given.
        program: also write the decode-time scorer here, as a program of torch.export (scorers/program.py); needs
            `model`.
        force: replace what `out` and `program` hold.

    Raises: VerdictNo for a run that found nothing to export; InputError for what is no source, no method, no policy,
        for `oracle`, and where `out` or `program` holds something else.
    Cost: none without `model`, whose weights are read for their fingerprint.
    """
    target = as_path(out, "output")
    refuse_source(source, target)
    given = _mapping("parameters", parameters)
    found = origin(source, bands, scorer, given)
    budget = _budget(budget_tokens, budget_bytes, keep_fraction)
    choice = ScorerChoice(name=found.scorer, parameters=found.parameters | given)
    made = choice.make()
    _refuse_weights(target, program, model)
    loaded = _loaded(model)
    write_program = None if program is None else _program(program, target, choice, loaded, force)
    wanted = usual(choice.name, budget)
    protect = {"sinks": sinks, "recent": recent, "prompt": protect_prompt}
    wanted["protect"] = wanted.get("protect", {}) | _said(protect)
    wanted |= {} if allocate is None else _shared(allocate, wanted)
    wanted |= _said({"trigger": trigger, "storage": storage, "reduce": reduce})
    if page_size is not None:
        wanted["granularity"] = {"unit": "page", "page_size": page_size}
    document = {
        "schema": SCHEMA,
        "scorer": {"name": choice.name, "parameters": _spelt_out(made)},
        "budget": budget.model_dump(),
        "model": _made_for(found, loaded),
        "evidence": found.evidence,
        "created": now(),
        "kvlens_version": __version__,
    }
    written = write_policy(PolicyFile(**_mapping("options", wanted | document)), target, force=force)
    if write_program is not None:
        write_program()
    return written


def _spelt_out(method: Any) -> dict[str, Any]:
    """All parameters of a scorer or an allocator."""
    return {part.name: getattr(method, part.name) for part in fields(method)}


def _said(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _mapping(what: str, value: object) -> dict[str, Any]:
    """A mapping from names, {} for None, in the form that JSON has. Raises: InputError where it is none."""
    try:
        if value is None or isinstance(value, Mapping):
            return dict(plain(value or {}))
    except TypeError as error:
        raise InputError(f"{what} hold what no file can: {error}", "give numbers, texts and lists of them") from error
    raise InputError(f"{what} {value!r:.80} are no mapping from names to values", "give a dict")


# 2.


def usual(scorer: str, budget: Budget) -> dict[str, Any]:
    """The fields of a policy that the method's paper sets; 128 recent tokens where the budget is no number of them."""
    recent = _USUAL_RECENT.get(scorer, _none)(budget.tokens)
    found: dict[str, Any] = {"protect": {"recent": recent}} if recent else {}
    if scorer in _KEEPS_PROMPT and budget.keep_fraction is None:  # a share of the prompt cannot hold the prompt
        found["protect"] = found.get("protect", {}) | {"prompt": True}
    return found | _USUAL.get(scorer, {})


def _shared(allocate: str | Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a policy that go with an allocator: heads apart and ragged, or layers apart, where it needs it."""
    given = {"name": allocate} if isinstance(allocate, str) else _mapping("allocate", allocate)
    choice = Allocate(**given)
    made = choice.make()
    if choice.table is not None:
        return {"allocate": given}
    found: dict[str, Any] = {"allocate": {"name": choice.name, "parameters": _spelt_out(made)}}
    if made.reads_scores:
        found |= {"reduce": "head", "storage": "ragged"}
    elif made.per_layer and "reduce" not in wanted:
        found["reduce"] = "layer"
    return found


def _none(_: int | None) -> int:
    return 0


def _quarter(tokens: int | None) -> int:
    return 128 if tokens is None else min(128, tokens // 4)


def _half(tokens: int | None) -> int:
    return 128 if tokens is None else tokens // 2


_USUAL_RECENT: dict[str, Callable[[int | None], int]] = {
    **dict.fromkeys(("epikv", "hidden_change", "band_adaptive"), _quarter),
    "h2o": _half,
    "snapkv": lambda tokens: 64 if tokens is None else min(64, tokens // 2),
}
_KEEPS_PROMPT = ("epikv", "hidden_change", "band_adaptive", "raas")
_USUAL: dict[str, dict[str, Any]] = {
    "h2o": {"reduce": "head"},
    "snapkv": {"reduce": "head", "trigger": "prefill"},
    "tova": {"reduce": "layer"},
}


def _budget(tokens: int | None, n_bytes: int | None, keep_fraction: float | None) -> Budget:
    given = {"tokens": tokens, "bytes": n_bytes, "keep_fraction": keep_fraction}
    return Budget(**given if _said(given) else {"tokens": DEFAULT_TOKENS})


# 3.


def _loaded(model: str | Path | Model | None) -> Model | None:
    """The model, on the CPU and unchecked where it is a name."""
    if model is None:
        return None
    from kvlens.model import as_model, load  # transformers, which only this needs

    return load(str(model), device="cpu", check=False) if isinstance(model, (str, Path)) else as_model(model)


def _refuse_weights(target: Path, program: str | Path | None, model: object) -> None:
    """Raise InputError where one to write is a file of the model's own folder and no policy, whatever force says."""
    if not isinstance(model, (str, Path)) or not os.path.isdir(model):
        return
    for path in (target, *([] if program is None else [as_path(program, "program file")])):
        if path.is_file() and os.path.realpath(path.parent) == os.path.realpath(model):
            try:
                read_policy(path)
            except InputError as error:
                raise InputError(f"'{path}' is a file of the model itself", "choose another file") from error


def _program(
    path: str | Path, policy: Path, choice: ScorerChoice, model: Model | None, force: bool
) -> Callable[[], None]:
    """What writes the scorer's program for this model. Raises: InputError without a model, and for a taken file."""
    if model is None:
        raise InputError("a program is made for the sizes of one model", "name it: -m MODEL")
    if os.path.realpath(as_path(path, "program file")) == os.path.realpath(policy):
        raise InputError(f"policy and program are both '{policy}'", "give each a file of its own")
    from kvlens.scorers.interface import Facts
    from kvlens.scorers.program import prepared

    layers = tuple(layer for layer, window in enumerate(model.sliding) if window is None)
    facts = Facts(model.n_layers, model.n_heads, model.n_kv_heads, model.d_head, layers)
    return prepared(path, choice.name, choice.parameters, facts, model.d_model, model.dtype, force=force)


def _made_for(found: Origin, model: Model | None) -> dict[str, Any] | None:
    """The model block. Raises: InputError where the run's model has another number of layers."""
    if model is None:
        return found.model
    run_layers = (found.model or {}).get("n_layers")
    if run_layers not in (None, model.n_layers):
        raise InputError(
            f"the run was measured on a model of {run_layers} layers, {model.name} has {model.n_layers}",
            "name the model that was measured, or leave -m out",
        )
    return {name: getattr(model, name) for name in ("fingerprint", "n_layers", "n_kv_heads", "d_head")}
