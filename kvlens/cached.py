"""Which models does the cache folder hold? Asked without loading torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import platformdirs

from kvlens.errors import EnvironmentLacks

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_NOTE = "Q4_1, dequantised"
MANIFEST = "manifest.json"


def cache_dir() -> Path:
    """The cache folder: `$KVLENS_CACHE`, else the platform's user cache folder for kvlens; not created here."""
    folder = os.environ.get("KVLENS_CACHE") or platformdirs.user_cache_dir("kvlens")
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:  # ~name of a user there is not
        raise EnvironmentLacks(f"the cache folder '{folder}' leads nowhere: {error}", "set $KVLENS_CACHE") from error


def cached_models() -> list[dict[str, Any]]:
    """The models in the cache folder: name, path, bytes, note. Whether one is whole is checked when it is loaded."""
    folders = sorted(path.parent for path in (cache_dir() / "models").glob(f"[!.]*/{MANIFEST}"))
    return [
        {
            "name": folder.name,
            "path": str(folder),
            "bytes": sum(file.stat().st_size for file in folder.iterdir()),
            "note": DEFAULT_NOTE if folder.name == DEFAULT_MODEL else "",
        }
        for folder in folders
    ]
