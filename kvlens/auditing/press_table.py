"""Which presses of kvpress can be audited, and how is one made at a given budget?

1. A row says what a press is made of beside `compression_ratio`: another press inside it, a ratio under another name,
   settings that it cannot do without. A new press is one row.
2. `NEEDS_NETWORK` and `NO_PREFILL` are refused by name, with the reason.
3. `read_press` reads `NAME[:key=value]...`; a name may be written as the class or in any case without `Press`.
4. kvpress is imported by `kvpress_module` alone, which leaves transformers' table of attention functions as it was:
   kvpress replaces every function in it when it is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from kvlens.backends import table_kept
from kvlens.errors import EnvironmentLacks, InputError
from kvlens.wording import extra

INNER = "SnapKVPress"  # inside the presses that are made of another one, unless `:press=NAME` says otherwise


@dataclass(frozen=True)
class Row:
    """How a press is made: `ratio` is what sets its budget (None: nothing does), `inner` how it takes another press."""

    ratio: str | None = "compression_ratio"
    inner: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    attention: bool = False  # whether it reads attention weights
    marks: bool = False  # whether it marks what it drops, head by head, and drops nothing
    scale: Callable[[float], float] = lambda ratio: ratio


INSIDE = Row(ratio=None, inner="press")
PRESSES: dict[str, Row] = {
    "KnormPress": Row(),
    "RandomPress": Row(settings={"seed": 0}),
    "StreamingLLMPress": Row(),
    "SnapKVPress": Row(),
    "TOVAPress": Row(),
    "LagKVPress": Row(),
    "KeyDiffPress": Row(),
    "ExpectedAttentionPress": Row(),
    "CompactorPress": Row(),
    "LeverageScorePress": Row(),
    "NonCausalAttnPress": Row(),
    "CURPress": Row(),
    "ObservedAttentionPress": Row(attention=True),
    "PyramidKVPress": Row(),
    "CriticalKVPress": INSIDE,
    "BlockPress": INSIDE,
    "ChunkPress": INSIDE,
    "ChunkKVPress": INSIDE,
    "KeyRerotationPress": INSIDE,
    "SimLayerKVPress": Row(ratio=None, settings={"lazy_threshold": 0.9, "n_recent": 256}),
    "AdaKVPress": replace(INSIDE, marks=True),
    "CriticalAdaKVPress": replace(INSIDE, marks=True),
    "KVzipPress": Row(marks=True),
    # a share of the keys' channels; half of its own claim, since values stay whole
    "ThinKPress": Row(ratio="key_channel_compression_ratio", scale=lambda ratio: min(0.5, 2 * ratio)),
}
NEEDS_NETWORK = {
    "DuoAttentionPress": "its head patterns",
    "ExpectedAttentionStatsPress": "its query statistics",
    "FastKVzipPress": "its gates",
    "KVzapPress": "its scoring model",
    "QFilterPress": "its filters",
}
NOT_HERE = {
    "DecodingPress": "it compresses while decoding, and an audit compresses once, after prefill",
    "PrefillDecodingPress": "it compresses while decoding, and an audit compresses once, after prefill",
    "FinchPress": "it needs a delimiter token that is put into the model's vocabulary",
    "DMSPress": "its budget is a threshold of scores, known only afterwards",
    "PerLayerCompressionPress": "its budget is a list, one ratio a layer",
    "ComposedPress": "its budget is the product of its parts'",
}


@dataclass(frozen=True)
class PressChoice:
    """A press by its class's name, with parameters; `seed` is the audit's, for a press that draws."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def label(self) -> str:
        """As it was asked for: name and parameters."""
        said = "".join(f":{key}={json.dumps(value).strip(chr(34))}" for key, value in self.parameters.items())
        return self.name + said


def read_press(words: str, seed: int = 0) -> PressChoice:
    """3. Raises: InputError for a press that is not known, not auditable, or a parameter that is no key=value."""
    name, *parts = words.split(":")
    known = {**PRESSES, **NEEDS_NETWORK, **NOT_HERE}
    short = {one.removesuffix("Press").lower(): one for one in known}
    found = known.keys() & {name} or {short.get(name.lower().removesuffix("press"), "")} - {""}
    if not found:
        near = get_close_matches(name.lower().removesuffix("press"), short, n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(short[one] for one in near)}? " if near else ""
        every = ", ".join(one.removesuffix("Press") for one in PRESSES)
        raise InputError(f"there is no press {name!r:.80}", f"{hint}the presses are {every}; or all of them: all")
    name = found.pop()
    if name in NEEDS_NETWORK:
        raise InputError(
            f"{name} fetches {NEEDS_NETWORK[name]} over the network when it starts", "choose another press"
        )
    if name in NOT_HERE:
        raise InputError(f"{name} cannot be audited: {NOT_HERE[name]}", "choose another press")
    return PressChoice(name, dict(_parameter(name, part) for part in parts), seed)


def _parameter(name: str, part: str) -> tuple[str, Any]:
    key, equals, value = part.partition("=")
    if not equals or not key:
        raise InputError(f"press {name}: {part!r:.80} is no key=value", f"such as {name}:window_size=32")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


# 4.


def kvpress_version() -> str:
    """The version of kvpress. Raises: EnvironmentLacks where it is not installed."""
    if importlib.util.find_spec("kvpress") is None:
        raise EnvironmentLacks("presses need the package kvpress", extra("presses"))
    return importlib.metadata.version("kvpress")


def kvpress_module() -> Any:
    """The package, imported so that no attention function of transformers is another one afterwards.

    Raises: EnvironmentLacks where it is not installed or cannot be imported.
    """
    version = kvpress_version()
    with table_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that it imports
        try:
            return importlib.import_module("kvpress")
        except Exception as error:  # what it needs is not there in the versions it needs
            raise EnvironmentLacks(f"importing kvpress {version} failed: {error!s:.200}", extra("presses")) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Within it kvpress logs errors alone: what it warns of (time, untested models) is no part of an audit."""
    log = logging.getLogger("kvpress")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def make_press(choice: PressChoice, ratio: float) -> Any:
    """The press that evicts this share, by its own class.

    Raises: InputError for a parameter that its class does not take, or refuses.
    """
    module, row = kvpress_module(), PRESSES[choice.name]
    drawn = {"seed": choice.seed} if "seed" in row.settings else {}
    settings = row.settings | drawn | choice.parameters
    if own := {"compression_ratio", row.ratio} & choice.parameters.keys():
        raise InputError(
            f"press {choice.name}: {own.pop()} is what its budget is made of, and the budget is every method's",
            "leave it out, and set the budget with --keep-fraction",
        )
    if row.inner is not None:
        inner = read_press(str(settings.pop("press", INNER)), choice.seed)
        if PRESSES[inner.name].ratio != "compression_ratio":
            raise InputError(f"{choice.name} takes a press that scores, not {inner.name}", "such as SnapKVPress")
        settings[row.inner] = make_press(inner, ratio)
    elif row.ratio is not None:
        settings = {row.ratio: row.scale(ratio)} | settings
    try:
        with quiet():
            return getattr(module, choice.name)(**settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise InputError(f"press {choice.label} cannot be made: {error!s:.200}", "leave the parameter out") from error


def reads_attention(choice: PressChoice) -> bool:
    """Whether the press, or the one inside it, reads attention weights."""
    inner = str(choice.parameters.get("press", INNER))
    return PRESSES[choice.name].attention or (
        PRESSES[choice.name].inner is not None and PRESSES[read_press(inner).name].attention
    )
