"""`kvlens models`: the models in the cache folder."""

from __future__ import annotations

from kvlens.cli import options
from kvlens.cli.output import Output, table


def command(json: options.Json = False, quiet: options.Quiet = False) -> None:
    """List the models in the cache folder."""
    from kvlens.model import cache_dir, cached_models

    models = cached_models()
    text = f"no model is cached in {cache_dir()} yet"
    if models:
        headers = list(models[0])
        text = table(
            headers, [["" if model[name] is None else str(model[name]) for name in headers] for model in models]
        )
    Output(json, quiet).answer(models, text=text, paths=[model["path"] for model in models])
