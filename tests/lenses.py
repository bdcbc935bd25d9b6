"""Lenses over the tiny models, or the reason why there can be none here."""

from __future__ import annotations

import importlib.metadata
from functools import cache

import pytest
from tiny import ATTENTION_FAMILIES
from tiny_tokenizers import byte_level

from kvlens.lens import Lens, open_lens
from kvlens.model import wrap


def require_transformer_lens() -> None:
    """Skips, saying why, where transformer_lens is absent or kvlens refuses to use it."""
    pytest.importorskip("transformer_lens", reason="transformer_lens is not installed")
    installed = importlib.metadata.version("transformers")
    if tuple(int(part) for part in installed.split(".")[:2]) >= (5, 24):
        pytest.skip(f"kvlens refuses transformer_lens on transformers {installed}")


@cache
def tiny_lens(family: str) -> Lens:
    """A lens over the family's tiny model; made once, so that edits that stay behind are noticed."""
    return open_lens(wrap(ATTENTION_FAMILIES[family](), byte_level()))
