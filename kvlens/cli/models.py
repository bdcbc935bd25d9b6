"""`kvlens models`: the models in the cache folder."""

from __future__ import annotations

from kvlens.cli import options
from kvlens.cli.output import Output, table
from kvlens.wording import size


def command(json: options.Json = False, quiet: options.Quiet = False) -> None:
    """List the models in the cache folder."""
    from kvlens.cached import cache_dir, cached_models

    models = cached_models()
    text = f"no model is cached in {cache_dir()} yet"
    if models:
        rows = [[model["name"], size(model["bytes"]), model["path"], model["note"]] for model in models]
        text = table(["name", "size", "path", "note"], rows, right=(1,))
    Output(json, quiet).answer(models, text=text, paths=[model["path"] for model in models])
