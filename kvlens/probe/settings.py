"""What was asked of a label run: every option in one frozen value, which is also what `run.json` keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args, get_type_hints

from kvlens import model as models
from kvlens.errors import InputError, ModelRefused
from kvlens.model import Model
from kvlens.probe.cells import name_cells, parse_cells
from kvlens.probe.deletion import refuse_what_needs_a_mask
from kvlens.probe.occlusion import FILLERS, Intervention, filler_ids
from kvlens.probe.subsets import require_surrogate
from kvlens.segmenting import UNITS

_MOST = 2**31 - 1  # token counts are kept in 32 bits
RANGES = {
    "window": (1, _MOST),
    "stride": (1, _MOST),
    "target_tokens": (1, _MOST),
    "lag": (0, _MOST),
    "random_subsets": (0, 100_000),
    "seed": (0, 2**63 - 1),
}
AUTO = "auto"
# The labels of the EpiKV paper: what differs from the defaults.
PRESETS: dict[str, dict[str, Any]] = {
    "epikv": {
        "intervention": "substitute",
        "window": 32,
        "stride": 16,
        "flips": True,
        "only_correct": True,
        "skip_prompt": True,
    }
}


@dataclass(frozen=True)
class Settings:
    """The configuration of a label run; None means: not asked for."""

    intervention: str = "evict"
    window: int = 1
    stride: int | None = None
    units: str | None = None
    cells: str = "all"
    lag: int | None = None
    filler: str = "randmulti"
    filler_id: int | None = None
    per_target: bool = False
    flips: bool = False
    only_correct: bool = False
    skip_prompt: bool = False
    random_subsets: int = 0
    screen: float | str | None = None
    chat: bool = False
    target_tokens: int = 48
    beyond_context: bool = False
    metric: str | None = None
    seed: int = 0

    def how(self, model: Model) -> Intervention:
        """The intervention on this model."""
        cells = parse_cells(self.cells, model.n_layers, model.n_heads)
        return Intervention(self.intervention, self.lag, cells, self.filler, self.filler_id, self.seed)


def make_settings(preset: str | None, metric: Callable[..., Any] | None, **asked: Any) -> Settings:
    """Settings from a preset and the options that were given (None: not given), checked for contradictions.

    What depends on the model is checked by `fit`, so that a slip is told before a model is loaded.
    """
    base: dict[str, Any] = {}
    if preset is not None:
        if not isinstance(preset, str) or preset not in PRESETS:
            raise InputError(f"preset {preset!r} does not exist", f"choose one of {', '.join(PRESETS)}")
        base = PRESETS[preset]
    if metric is not None:
        if not callable(metric):
            raise InputError(f"metric {metric!r} cannot be called", "give a function of (logits, target ids)")
        asked["metric"] = f"{getattr(metric, '__module__', '')}.{getattr(metric, '__qualname__', repr(metric))}"
    given = {name: value for name, value in asked.items() if value is not None}
    if "units" in given and (given.keys() & {"window", "stride"}):
        raise InputError("windows are units of the text or of a fixed width", "drop --units, or --window and --stride")
    check_values(given)
    settings = Settings(**(base | given))
    if "filler" in given and settings.intervention != "substitute":
        raise InputError(
            f"{settings.intervention} puts no filler in", "drop --filler, or use --intervention substitute"
        )
    _check(settings)
    return replace(settings, stride=settings.stride or settings.window)


def fit(settings: Settings, model: Model) -> Settings:
    """The settings on this model, its cells in one spelling.

    Raises: InputError, ModelRefused where the model, its attention backend or its tokenizer cannot do what is asked.
    """
    how = settings.how(model)
    _check_engine(settings, how, model)
    return replace(settings, cells=name_cells(how.cells))


def check_values(asked: Mapping[str, Any]) -> None:
    """Nothing; raises InputError for an option of another type than its field here, or outside its range.

    True and False are no numbers.
    """
    hints = get_type_hints(Settings)
    for name, value in asked.items():
        allowed = get_args(hints[name]) or (hints[name],)
        accepted = type(value) in allowed or (isinstance(value, str) and str in allowed)
        if not accepted and not (type(value) is int and float in allowed):
            words = " or ".join(kind.__name__ for kind in allowed if kind is not type(None))
            raise InputError(f"{name} {value!r} is of type {type(value).__name__}", f"give {words}")
        if name in RANGES and not RANGES[name][0] <= value <= RANGES[name][1]:
            low, high = RANGES[name]
            raise InputError(f"{name} {value} is outside {low} to {high}", "give a whole number inside this range")


def _check(settings: Settings) -> None:
    if settings.units is not None and settings.units not in UNITS:
        raise InputError(f"unit {settings.units!r} does not exist", f"choose one of {', '.join(UNITS)}")
    if settings.filler not in FILLERS:
        raise InputError(f"filler {settings.filler!r} does not exist", f"choose one of {', '.join(FILLERS)}")
    if settings.random_subsets:
        require_surrogate()
    plain_evict = settings.intervention == "evict" and settings.lag is None
    if settings.screen is not None:
        wrong = settings.screen != AUTO and not (isinstance(settings.screen, (int, float)) and 0 < settings.screen <= 1)
        if wrong:
            raise InputError(f"screen {settings.screen!r} is no fraction", "give a fraction above 0 up to 1, or auto")
        if not plain_evict:
            raise InputError("the gradient screen predicts evict alone", "drop --screen, or use evict without --lag")
    if settings.random_subsets and not plain_evict:
        raise InputError("random subsets are evicted at the end of the context", "use evict without --lag")


def _check_engine(settings: Settings, how: Intervention, model: Model) -> None:
    """Nothing; raises where the model's attention backend or tokenizer cannot do what is asked."""
    if how.kind == "substitute":
        (filler,) = filler_ids(how, 1, 0, model).tolist()
        if not 0 <= filler < model.d_vocab:
            raise InputError(
                f"filler {settings.filler!r} is token {filler}, and the vocabulary of {model.name} ends at "
                f"{model.d_vocab - 1}",
                "use --filler randmulti",
            )
    if not models.ignores_masks(model):
        return
    refuse_what_needs_a_mask(model, how)
    if settings.flips or settings.screen is not None:
        raise ModelRefused(
            f"flips and screens need an attention backend that honours masks, not {model.attention!r}",
            "use --attention sdpa or eager",
        )


def as_config(settings: Settings) -> dict[str, Any]:
    """The settings as `run.json` keeps them; the seed stands beside them there. Units of the text have no width."""
    config = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name != "seed"}
    return config | ({"window": None, "stride": None} if settings.units else {})
