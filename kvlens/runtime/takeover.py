"""May a run work on this cache? Whatever it cannot go on with gives wrong numbers or fails far inside the model.

1. A cache belongs to the model that filled it, and to one forward pass at a time.
2. A cache of a run that is over is taken over where the scorer is the same (its statistics go on) and the policy keeps
   tokens together as it did before, or further apart: what left from one head cannot come back for all to agree again.
   Only a run with storage 'ragged' attends to heads of different lengths.
3. Layers and ledger must hold the same number of slots: they do not after tokens came outside `apply`, nor after a
   forward pass of some of the layers.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache

from kvlens.errors import InputError
from kvlens.runtime.cache import Ledger, adopt
from kvlens.runtime.ragged import RaggedLayer

if TYPE_CHECKING:
    from kvlens.runtime.apply import Run

_NEW = "start a new cache"


def is_anothers(run: Run, cache: Cache, ledger: Ledger) -> bool:
    """Whether another run is at work on this cache; where that run is over, the cache is this one's afterwards.

    Raises: InputError for a cache that this run cannot work on.
    """
    owner = ledger.owner()
    active = owner is not None and owner.active
    # 1.
    same = owner.model.decoder is run.model.decoder if owner is not None and active else ledger.model == identity(run)
    if not same:
        raise InputError(f"this cache was filled by another model than {run.model.name}", _NEW)
    if owner is not run and active:
        return True
    if ledger.driven:
        raise InputError("this cache is in another forward pass, of another thread", "give each thread its own cache")
    if owner is not run:
        _check_policy(run, cache, ledger)
        ledger.owner = weakref.ref(run)
    if not ledger.broken:  # a broken one says so itself, where it is used
        check_whole(cache, ledger)
    return False


def begin(run: Run, cache: Cache, n_rows: int) -> Ledger:
    """The ledger of an empty cache, whose layers are evicting ones afterwards. Raises: as `adopt` does."""
    none = torch.zeros(n_rows, dtype=torch.long, device=run.model.device)
    state, whose = run.scorer.init(run.facts), weakref.ref(run)
    ledger = Ledger(run.scorer, state, run.layers, whose, none, none, model=identity(run))
    adopt(cache, ledger, run.model)
    return ledger


def identity(run: Run) -> str:
    """Which architecture the model is of: the first half of its fingerprint."""
    return run.model.fingerprint.partition("-")[0]


def _check_policy(run: Run, cache: Cache, ledger: Ledger) -> None:
    """2."""
    if ledger.scorer != run.scorer:
        raise InputError(
            f"this cache was scored by {ledger.scorer!r:.120}, the policy now says {run.scorer!r:.120}",
            f"go on under the same scorer, or {_NEW}",
        )
    check_shape(run, cache, ledger)


def check_shape(run: Run, cache: Cache, ledger: Ledger) -> None:
    """2. Nothing; raises InputError where tokens are kept further apart than the policy of the run can go on with."""
    apart = "head" if any(held.shape[1] > 1 for held in ledger.sets) else "layer" if len(ledger.sets) > 1 else "all"
    ragged = any(isinstance(cache.layers[index], RaggedLayer) for index in ledger.layers)
    reduce, storage = run.policy.reduce, run.policy.storage
    wider = {"all": ("all", "layer", "head"), "layer": ("layer", "head"), "head": ("head",)}[apart]
    if reduce not in wider or (ragged and storage != "ragged"):
        raise InputError(
            f"this cache was kept by {apart}{', ragged' if ragged else ''}; "
            f"the policy now says reduce {reduce!r}, storage {storage!r}",
            f"go on with reduce {' or '.join(map(repr, wider))}{', storage ragged' if ragged else ''}, or {_NEW}",
        )


def check_whole(cache: Cache, ledger: Ledger) -> None:
    """3. Nothing; raises InputError where a layer holds other tokens than the ledger says."""
    for index in ledger.layers:
        n_known = ledger.set_of(index).shape[-1] if ledger.sets else 0
        n_held = cache.layers[index].n_held
        if n_held != n_known:
            raise InputError(
                f"layer {index} of this cache holds {n_held} tokens and its policy knows of {n_known}: tokens came "
                "outside kvlens.apply, or through some of the layers only",
                _NEW,
            )
