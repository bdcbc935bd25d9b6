"""Which contiguous layers correlate with the label more than chance does? Cluster-based permutation over layers.

Input is one number per trace and layer (a rank correlation); NaN where it has no meaning.

1. The statistic of a layer is the t of its mean over traces.
2. A cluster is a run of neighbouring layers with t beyond the forming threshold on one side: Student's t at a two-sided
   .05 for that many traces. Its mass is the sum of what exceeds the threshold: summing t itself would let many layers
   that barely pass outweigh a narrow band that stands out. A lower threshold misses narrow bands, a higher one cuts off
   the edges of wide ones; experiments/02_band_power.py tries four.
3. Null: the signs of whole traces are flipped, all layers of a trace together, so that what is common to neighbouring
   layers and to neighbouring tokens stays as it is; the largest mass of either sign over all clusters is kept.
4. A cluster is a band when at most .05 of the flips give that mass or more: family-wise over layers and both signs.

Source: Maris and Oostenveld (2007) for clusters; mass above the threshold and the unit (whole traces) as said here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from kvlens.stats import LEVEL, SAME, require_scipy, sign_flips, t_statistics

FORMING_LEVEL = 0.05


@dataclass(frozen=True, slots=True)
class Cluster:
    """Neighbouring layers [start, stop) of one sign, their mass, and its family-wise p."""

    sign: int
    start: int
    stop: int
    mass: float
    p_value: float


def find_bands(
    values: Float[np.ndarray, "trace layer"], seed: int, forming_level: float = FORMING_LEVEL
) -> list[Cluster]:
    """The clusters that sign flips of whole traces do not explain, by their first layer; none under two traces."""
    if len(values) < 2:
        return []
    threshold = forming_threshold(len(values), forming_level)
    t = t_statistics(values, sign_flips(len(values), seed))
    null = np.maximum(heaviest(t, threshold).mass, heaviest(-t, threshold).mass)
    found = []
    for sign in (1, -1):
        for start, stop in runs(sign * t[0] > threshold):
            mass = float((sign * t[0, start:stop] - threshold).sum())
            p_value = float((null >= mass * SAME).mean())
            if p_value <= LEVEL:
                found.append(Cluster(sign, start, stop, mass, p_value))
    return sorted(found, key=lambda cluster: cluster.start)


def forming_threshold(n_traces: int, level: float = FORMING_LEVEL) -> float:
    """The |t| beyond which a layer belongs to a cluster."""
    return float(require_scipy().t.ppf(1 - level / 2, n_traces - 1))


class Heaviest(NamedTuple):
    """Of each draw: the mass of its heaviest cluster, the layers [start, stop), and their mean weighted by mass."""

    mass: Float[np.ndarray, " draw"]
    start: Int[np.ndarray, " draw"]
    stop: Int[np.ndarray, " draw"]
    centre: Float[np.ndarray, " draw"]


def heaviest(t: Float[np.ndarray, "draw layer"], threshold: float) -> Heaviest:
    """The heaviest positive cluster of each draw; all 0 without one."""
    n = len(t)
    mass, moment, start = np.zeros(n), np.zeros(n), np.zeros(n, dtype=int)
    best = Heaviest(np.zeros(n), np.zeros(n, dtype=int), np.zeros(n, dtype=int), np.zeros(n))
    for layer in range(t.shape[1]):
        above = np.maximum(t[:, layer] - threshold, 0.0)
        start = np.where((above > 0) & (mass == 0), layer, start)
        mass = np.where(above > 0, mass + above, 0.0)
        moment = np.where(above > 0, moment + above * (layer + 0.5), 0.0)
        here = Heaviest(mass, start, np.full(n, layer + 1), moment / np.maximum(mass, 1e-300))
        better = mass > best.mass
        best = Heaviest(*(np.where(better, new, old) for new, old in zip(here, best, strict=True)))
    return best


def runs(inside: Bool[np.ndarray, " layer"]) -> list[tuple[int, int]]:
    """The maximal runs [start, stop) of True."""
    edges = np.flatnonzero(np.diff(np.r_[False, inside, False].astype(int)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def stability(values: Float[np.ndarray, "trace layer"], band: Cluster, seed: int) -> tuple[float, list[float]]:
    """How often `band` is found when one trace is left out, and how often each of its layers is in what is found.

    Found means: a band of the same sign that shares a layer with it.
    Cost: a search for bands per trace.
    """
    overlap = np.zeros((len(values), band.stop - band.start), dtype=bool)
    for trace in range(len(values)):
        for other in find_bands(np.delete(values, trace, axis=0), seed):
            if other.sign == band.sign:
                start, stop = max(other.start, band.start), min(other.stop, band.stop)
                overlap[trace, start - band.start : max(stop, start) - band.start] = True
    return float(overlap.any(1).mean()), [float(share) for share in overlap.mean(0)]


def depths(start: int, stop: int, n_layers: int) -> tuple[float, float]:
    """The layers [start, stop) as fractions of the depth."""
    return start / n_layers, stop / n_layers


def layers_of(depth_start: float, depth_stop: float, n_layers: int) -> tuple[int, int]:
    """The layers [start, stop) of a model with `n_layers` that lie between two depths: floor and ceil.

    The digits beyond the ninth are rounding of the fractions and do not count.
    """
    start, stop = np.floor(round(depth_start * n_layers, 9)), np.ceil(round(depth_stop * n_layers, 9))
    return int(start), int(stop)
