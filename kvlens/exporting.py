"""How does a finding become a policy file?

1. A source says which method scores, with which parameters: a bands run (the middle layers of its confirmed bands), a
   ranking (the weights of its `fitted.json`), the published depths (`bands="paper"`), or the method's own name.
2. What the method's paper protects is the default (`usual`); every other field says itself, or keeps the policy's
   default. All parameters are spelt out, so that a default that changes later changes no file.
3. The model block comes from `model`, else from the run; the evidence is the source's SHA-256 and headline numbers.
4. The policy is checked in the form in which the file holds it, then written.

A run whose verdict is "no band" exports nothing: VerdictNo, exit 1.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvlens import __version__
from kvlens.causal_lm import Model
from kvlens.discover.combine import FITTED
from kvlens.discover.movement import read_bands
from kvlens.disk import as_path, disk
from kvlens.errors import InputError, VerdictNo
from kvlens.loading import Run, intact, read_meta
from kvlens.policy import Budget, ScorerChoice
from kvlens.policy_file import SCHEMA, PolicyFile, write_policy
from kvlens.provenance import now, plain
from kvlens.runstate import STATE
from kvlens.schemas import BANDS, RANKING
from kvlens.scorers import table

DEFAULT_TOKENS = 512
BANDED, FIT = "epikv", "fitted"
PUBLISHED = "kvlens export --bands paper takes the published depths"
DEPTHS = {1: "depth_a", -1: "depth_b"}  # by the sign of a band
SIGNS = {1: "positive", -1: "negative"}
CHANGE = ("hidden_change", "hidden_change_rolling", "hidden_change_z")
SOURCE_HINT = "give what `kvlens bands` or `kvlens signals` wrote: the folder, its bands.json or its fitted.json"
MOST_SOURCE_BYTES = 2**26


@dataclass(frozen=True)
class Origin:
    """What a source says: the method, its parameters, the model it was measured on, the evidence."""

    scorer: str
    parameters: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    evidence: tuple[dict[str, Any], ...] = ()


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
    force: bool = False,
) -> PolicyFile:
    """The policy that the file `out` holds afterwards.

    Args:
        source: a bands run or its `bands.json`, or a run of `kvlens.signals` or its `fitted.json`.
        bands: "paper" takes the published depths instead.
        scorer: the method where no source says it, or another one that takes two depths.
        parameters: of the method; they go before the source's.
        model: fills the model block: layers, KV heads, head width, fingerprint.
        page_size: evict whole pages of so many positions.
        allocate: a name, or `{"name": "table", "table": [[...], ...]}`, a budget for every layer and KV head.
        budget_tokens, budget_bytes, keep_fraction: one of them; 512 tokens where none is given.
        force: replace what `out` holds.

    Raises: VerdictNo for a run that found nothing to export; InputError for what is no source, no method, no policy,
        for `oracle`, and where `out` holds something else.
    Cost: none without `model`, whose weights are read for their fingerprint.
    """
    target = as_path(out, "output")
    _refuse_source(source, target)
    given = _mapping("parameters", parameters)
    origin = _origin(source, bands, scorer, given)
    budget = _budget(budget_tokens, budget_bytes, keep_fraction)
    choice = ScorerChoice(name=origin.scorer, parameters=origin.parameters | given)
    made = choice.make()
    wanted = usual(choice.name, budget)
    protect = {"sinks": sinks, "recent": recent, "prompt": protect_prompt}
    wanted["protect"] = wanted.get("protect", {}) | _said(protect)
    wanted |= _said({"trigger": trigger, "storage": storage, "reduce": reduce})
    if page_size is not None:
        wanted["granularity"] = {"unit": "page", "page_size": page_size}
    if allocate is not None:
        wanted["allocate"] = {"name": allocate} if isinstance(allocate, str) else _mapping("allocate", allocate)
    spelt_out = {part.name: getattr(made, part.name) for part in fields(made)}  # type: ignore[arg-type]
    document = {
        "schema": SCHEMA,
        "scorer": {"name": choice.name, "parameters": spelt_out},
        "budget": budget.model_dump(),
        "model": _made_for(origin, model),
        "evidence": origin.evidence,
        "created": now(),
        "kvlens_version": __version__,
    }
    return write_policy(PolicyFile(**_mapping("options", wanted | document)), target, force=force)


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


# 1.


def _origin(source: object, bands: object, scorer: object, given: Mapping[str, Any]) -> Origin:
    """What the one source that was named says."""
    if scorer is not None and not isinstance(scorer, str):
        raise InputError(f"scorer {scorer!r:.80} is no name", f"the scorers are {', '.join(table.TABLE)}")
    if scorer == "oracle":
        raise InputError(
            "oracle replays labels of the very text it is asked of: it is offline only and exports nothing",
            "export a scorer that reads what a decoder has",
        )
    if bands is not None and (source is not None or bands != "paper"):
        what = "bands and a source were both given" if source is not None else f"bands {bands!r:.80} are not known"
        raise InputError(what, "give a bands run, or --bands paper for the published depths")
    if source is None and bands is None:
        if scorer is None:
            raise InputError("nothing to export was named", "give a bands or signals run, --bands paper or --scorer")
        return Origin(scorer)
    if bands is not None:
        _refuse_without_depths(scorer or BANDED)
        return Origin(scorer or BANDED)  # the published depths are its defaults
    file, document, digest = _read_source(source)
    if document["schema"] == BANDS:
        return _of_bands(file, scorer or BANDED, given)
    if scorer not in (None, FIT):
        raise InputError(f"'{file}' holds fitted weights, which scorer {scorer} does not take", "leave --scorer out")
    return _of_fit(file, document, digest)


def _read_source(source: Any) -> tuple[Path, dict[str, Any], str]:
    """The document that a run or a file is, with its path and SHA-256."""
    path = as_path(source.path if isinstance(source, Run) else source, "source")
    failed = f"'{path}' is no source of a policy"
    with disk(f"reading '{path}'"):
        if path.is_dir():
            meta = read_meta(path)
            names = {BANDS: "bands.json", RANKING: "fitted.json"}
            if meta["schema"] not in names:
                raise InputError(f"{failed}: it is a run of schema '{meta['schema']}'", SOURCE_HINT)
            path = intact(path, meta, names[meta["schema"]])
        if not path.is_file():
            raise InputError(f"{failed}: there is no such file or folder", SOURCE_HINT)
        with path.open("rb") as stream:
            content = stream.read(MOST_SOURCE_BYTES + 1)
    if len(content) > MOST_SOURCE_BYTES:
        raise InputError(f"{failed}: it has more than {MOST_SOURCE_BYTES:,} bytes", SOURCE_HINT)
    try:
        document = json.loads(content)
        schema = document["schema"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{failed}: it is no JSON object with a schema", SOURCE_HINT) from error
    if schema not in (BANDS, FITTED):
        raise InputError(f"{failed}: its schema is {schema!r:.80}", SOURCE_HINT)
    return path, document, hashlib.sha256(content).hexdigest()


def _refuse_source(source: object, target: Path) -> None:
    """Nothing; raises InputError where `out` is what is read, or a file of that run."""
    path = source.path if isinstance(source, Run) else source
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        return
    there = os.path.realpath(path)
    same = os.path.realpath(target) == there
    of_the_run = os.path.dirname(os.path.realpath(target)) == there and target.name in (
        STATE,
        "bands.json",
        "fitted.json",
    )
    if same or of_the_run:
        raise InputError(f"'{target}' is to be written, but the source is read from there", "give another --out")


def _of_bands(file: Path, scorer: str, given: Mapping[str, Any]) -> Origin:
    """The middle layers of the confirmed bands of both signs, as fractions of the depth.

    The middle is the lower of two; of the paper's bands, [7, 14) and [18, 26) of 32, these are its layers 10 and 21.
    """
    _refuse_without_depths(scorer)
    found = read_bands(file)
    if found["signal"] not in CHANGE:
        raise InputError(
            f"'{file}' holds bands of {found['signal']!r:.40}, and {scorer} reads how the hidden state moves",
            f"give bands of {' or '.join(CHANGE)}",
        )
    if found.get("verdict") == "no band":
        raise VerdictNo(f"'{file}' found no band: {found.get('reason', '')!s:.200}", PUBLISHED)
    try:
        best = _confirmed(found["bands"], len(found["layers"]))
        numbers = {name: found[name] for name in ("signal", "intervention", "verdict", "n_traces", "n_tokens")}
        model = {"fingerprint": found["model"]["fingerprint"], "n_layers": len(found["layers"])}
        numbers["model"] = found["model"]["name"]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"reading '{file}' failed: it is damaged or no bands ({error})", SOURCE_HINT) from error
    lacking = [sign for sign, name in DEPTHS.items() if sign not in best and name not in given]
    if lacking:
        raise VerdictNo(
            f"'{file}' confirmed no {' and no '.join(SIGNS[sign] for sign in lacking)} band, and {scorer} takes the "
            "difference of a positive and a negative one",
            f"--set {DEPTHS[lacking[0]]}=FRACTION says the other depth by hand; {PUBLISHED}",
        )
    kept = ("sign", "start", "stop", "confirm_rho", "confirm_low", "confirm_high")
    numbers["bands"] = [{name: band.get(name) for name in kept} for band in best.values()]
    depths = {
        DEPTHS[sign]: ((band["start"] + band["stop"] - 1) // 2) / len(found["layers"]) for sign, band in best.items()
    }
    evidence = {"schema": BANDS, "sha256": found["hash"], "path": _shown(file), "numbers": numbers}
    return Origin(scorer, depths, model, (evidence,))


def _confirmed(bands: list[dict[str, Any]], n_layers: int) -> dict[int, dict[str, Any]]:
    """By sign, the confirmed band with the largest correlation in the half that confirms."""
    best: dict[int, dict[str, Any]] = {}
    for band in bands:
        if band["confirmed"] is not True:
            continue
        if not (type(band["start"]) is type(band["stop"]) is int and 0 <= band["start"] < band["stop"] <= n_layers):
            raise ValueError(f"no band of {n_layers} layers: {band['start']!r:.20} to {band['stop']!r:.20}")
        if band["sign"] not in best or abs(band["confirm_rho"]) > abs(best[band["sign"]]["confirm_rho"]):
            best[band["sign"]] = band
    return best


def _refuse_without_depths(scorer: str) -> None:
    """Nothing; raises InputError for a method that takes no two depths."""
    takes = {part.name for part in fields(table.TABLE[scorer])} if scorer in table.TABLE else set()
    if scorer not in table.TABLE:
        table.make(scorer, {})  # says which there are
    if not takes >= set(DEPTHS.values()):
        raise InputError(f"scorer {scorer} takes no depths of bands", f"leave --scorer out for {BANDED}")


def _of_fit(file: Path, document: dict[str, Any], digest: str) -> Origin:
    """The features with their weights, as `fitted.json` has them."""
    try:
        features, about, held_out = document["features"], document["model"], document["held_out"]
        if not features:
            raise VerdictNo(f"'{file}' holds no causal signal, so no score", PUBLISHED)
        numbers = {name: document[name] for name in ("intervention", "n_traces", "n_tokens")}
        numbers |= {"model": about["name"], "features": [feature["signal"] for feature in features]}
        if held_out is not None:
            numbers |= {name: held_out[name] for name in ("score", "beyond_position")}
        model = {"fingerprint": about["fingerprint"], "n_layers": about["n_layers"]}
    except (KeyError, TypeError) as error:
        raise InputError(f"reading '{file}' failed: it is damaged ({error})", SOURCE_HINT) from error
    evidence = {"schema": FITTED, "sha256": digest, "path": _shown(file), "numbers": numbers}
    return Origin(FIT, {"features": features}, model, (evidence,))


def _shown(file: Path) -> str:
    """A path as text; bytes that are no UTF-8 are spelt out."""
    return os.fsencode(file).decode("utf-8", "backslashreplace")


# 2.


def usual(scorer: str, budget: Budget) -> dict[str, Any]:
    """The fields of a policy that the method's paper sets; 128 recent tokens where the budget is no number of them."""
    recent = _USUAL_RECENT.get(scorer, _none)(budget.tokens)
    found: dict[str, Any] = {"protect": {"recent": recent}} if recent else {}
    if scorer in _KEEPS_PROMPT and budget.keep_fraction is None:  # a share of the prompt cannot hold the prompt
        found["protect"] = found.get("protect", {}) | {"prompt": True}
    return found | _USUAL.get(scorer, {})


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


def _made_for(origin: Origin, model: str | Path | Model | None) -> dict[str, Any] | None:
    """The model block. Raises: InputError where the run's model has another number of layers."""
    if model is None:
        return origin.model
    from kvlens.model import as_model, load  # transformers, which only this needs

    if isinstance(model, (str, Path)):
        model = load(str(model), device="cpu", check=False)
    model = as_model(model)
    run_layers = (origin.model or {}).get("n_layers")
    if run_layers not in (None, model.n_layers):
        raise InputError(
            f"the run was measured on a model of {run_layers} layers, {model.name} has {model.n_layers}",
            "name the model that was measured, or leave -m out",
        )
    return {name: getattr(model, name) for name in ("fingerprint", "n_layers", "n_kv_heads", "d_head")}
