"""`kvlens observe`: cheap signals of every token of every trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlens.cli import options
from kvlens.cli.output import Output, columns
from kvlens.wording import counted

if TYPE_CHECKING:
    from kvlens.loading import Run


def command(
    traces: options.Traces,
    out: options.Out,
    model: options.Model = "smollm2-135m",
    signals: Annotated[
        str, typer.Option("--signals", metavar="A,B,...|all", help="Which signals; a wrong name lists what there is.")
    ] = "all",
    chat: options.Chat = False,
    target_tokens: Annotated[
        int, typer.Option("--target-tokens", min=1, metavar="N", help="Target of plain texts, left out of the pass.")
    ] = 48,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    attention: options.Attention = "auto",
    seed: options.Seed = 0,
    limit: options.Limit = None,
    beyond_context: options.BeyondContext = False,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Read signals off one forward pass over prompt and reasoning: how the hidden state moves, keys, attention, ..."""
    from kvlens.probe.observe import observe

    say = Output(json, quiet)
    with say.progress("tokens") as tick:
        run = observe(
            traces, model, out,
            signals=signals, chat=chat, target_tokens=target_tokens, device=device, dtype=dtype, attention=attention,
            seed=seed, limit=limit, beyond_context=beyond_context, force=force, progress=tick, note=say.note,
        )  # fmt: skip
    say.answer(_document(run), text=_text(run), paths=[run.path])


def _document(run: Run) -> dict[str, Any]:
    config = run.meta["config"]
    kinds = [
        {"name": name, "per_layer": name in config["per_layer"], "causal": name in config["causal"]}
        for name in config["signals"]
    ]
    facts = {name: run.meta[name] for name in ("schema", "model", "dtype", "device", "attention", "counts")}
    return {**facts, "n_layers": config["n_layers"], "signals": kinds, **run.meta["results"], "run": run.path}


def _text(run: Run) -> str:
    meta, config = run.meta, run.meta["config"]
    note = f" ({meta['model']['note']})" if meta["model"]["note"] else ""
    per_layer = [name for name in config["signals"] if name in config["per_layer"]]
    facts = {
        "model": f"{meta['model']['name']}{note}",
        "precision": f"{meta['dtype']} on {meta['device']}, attention {meta['attention']}",
        "traces": f"{meta['counts']['traces']:,}, {meta['counts']['tokens']:,} tokens of prompt and reasoning",
        f"{config['n_layers']} layers": ", ".join(per_layer),
        "one number": ", ".join(name for name in config["signals"] if name not in per_layer),
        "not causal": ", ".join(name for name in config["signals"] if name not in config["causal"]),
        "no value": "; ".join(
            f"{name} in {counted(len(ids), 'trace')} too short for it"
            for name, ids in meta["results"]["too_short"].items()
        ),
        "run": run.path,
    }
    return columns({name: value for name, value in facts.items() if value})
