"""`segment_hidden`: ThinKV's segments, ranked within by how the residual stream moves.

1. Segments of 128 tokens are typed R, E or T by tertiles of attention entropy (`thoughts.py`), as `thinkv` with
   `parity`; 64, 32 and 8 of their tokens are meant to stay.
2. Within a segment tokens rank by `epikv`'s number: the causal z-score of the change in block a minus that in block b.
3. The score is minus a token's rank over its segment's budget. The segment under way is not judged yet, so it stays.

Defaults: `size` 128, `budgets` (64, 32, 8), depths and window of `epikv`. Query-agnostic: no token is judged by who
looks at it. For decoding; needs own rows (their entropy types segments) and hidden states. Cost: one more product of
queries and keys; carried, what `epikv` carries and 12 bytes a segment.

Source: a hybrid of EpiKV, arXiv 2606.26472, with ThinKV, arXiv 2510.01290.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from jaxtyping import Float
from torch import Tensor

from kvlens.observables import rolling
from kvlens.scorers import thoughts
from kvlens.scorers.asking import unjudged
from kvlens.scorers.hidden_change import DEPTH_A, DEPTH_B, EpiKV, Moved
from kvlens.scorers.interface import HIDDEN, SPREAD, Depth, Facts, Plain, Seen, Views, Window
from kvlens.scorers.interface import Kept as Left
from kvlens.scorers.thoughts import Budgets, Segments, Size


@dataclass(frozen=True)
class Segmented:
    """What the segments look like, and `epikv`'s state."""

    segments: Segments
    moved: Moved

    def select(self, kept: Left) -> Segmented:
        """After an eviction."""
        return replace(self, moved=self.moved.select(kept))


@dataclass(frozen=True)
class SegmentHidden(Plain):
    """The rank of a token's z-score in its segment, over the segment's budget."""

    size: Size = thoughts.SIZE
    budgets: Budgets = (64, 32, 8)
    depth_a: Depth = DEPTH_A
    depth_b: Depth = DEPTH_B
    window: Window = rolling.WINDOW
    exclude_current: bool = False

    needs = frozenset({SPREAD, HIDDEN})

    def _within(self) -> EpiKV:
        """What ranks within a segment."""
        shared = {part.name for part in fields(EpiKV)} & {part.name for part in fields(self)}
        return EpiKV(**{name: getattr(self, name) for name in shared})

    def hidden_layers(self, facts: Facts) -> tuple[int, ...]:
        """Blocks a and b of this model."""
        return self._within().hidden_layers(facts)

    def init(self, facts: Facts) -> Segmented:
        """Nothing seen."""
        return Segmented(Segments(self.size), self._within().init(facts))

    def observe(self, state: Segmented, seen: Seen) -> Segmented:
        """1. and 2. for the new tokens."""
        entropy = thoughts.of_spread(seen.spread, thoughts.ENTROPY, seen.positions)
        segments = state.segments.extended(seen.positions, -entropy)
        return Segmented(segments, self._within().observe(state.moved, seen))

    def score(self, state: Segmented, views: Views) -> Float[Tensor, "batch heads kept"]:
        """3."""
        types = state.segments.types()[views.rows].to(views.positions.device)
        if not types.numel():
            return unjudged(views)
        segment, kind = thoughts.of_slots(types, views.positions, self.size)
        return thoughts.by_budget(self._within().score(state.moved, views), segment, kind, self.budgets)
