"""Figures on matplotlib axes, of a column's width: every function takes `ax` or makes its own, and returns it."""

from kvlens.plots.ceilings import (
    ceiling_distribution,
    cell_map,
    dropped_mass_auc,
    free_weights,
    predictors,
    rule_excess,
)
from kvlens.plots.deploy import claimed_and_held, stored_bytes
from kvlens.plots.discovery import label_agreement, layer_profile, position_trend, signal_ranking
from kvlens.plots.labels import effect_distribution, token_effects
from kvlens.plots.style import LINES, MINUS, NOISE, PLUS, SHADES, SIZE_INCHES
from kvlens.plots.surprise import kept_tokens, score_staleness

__all__ = [
    "LINES",
    "MINUS",
    "NOISE",
    "PLUS",
    "SHADES",
    "SIZE_INCHES",
    "ceiling_distribution",
    "cell_map",
    "claimed_and_held",
    "dropped_mass_auc",
    "effect_distribution",
    "free_weights",
    "kept_tokens",
    "label_agreement",
    "layer_profile",
    "position_trend",
    "predictors",
    "rule_excess",
    "score_staleness",
    "signal_ranking",
    "stored_bytes",
    "token_effects",
]
