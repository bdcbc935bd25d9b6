"""`kvlens bands`: in which layers a signal goes with importance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvlens.cli import options
from kvlens.cli.output import Output, columns, interval, number, table


def command(
    labels: options.Labels,
    signals: options.Signals,
    out: options.Out,
    signal: Annotated[
        str, typer.Option("--signal", metavar="NAME", help="The per-layer signal.")
    ] = "hidden_change_rolling",
    compare: Annotated[
        Path | None,
        typer.Option("--compare", metavar="OTHER_BANDS", help="Another bands run: does the band move between the two?"),
    ] = None,
    audit_only: options.AuditOnly = False,
    seed: options.Seed = 0,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Find the layers whose signal goes with importance on half of the traces, and confirm them on the other half."""
    from kvlens.discover.bands import bands

    run = bands(labels, signals, out, signal=signal, compare=compare, audit_only=audit_only, seed=seed, force=force)
    document = run.documents["bands"]
    text = _text(run.path, document, run.meta["counts"]["skipped"])
    Output(json, quiet).answer({"run": run.path, **document}, text=text, paths=[run.path])


def _text(path: str, found: dict[str, Any], left_out: list[dict[str, str]]) -> str:
    model = found["model"]
    note = f" ({model['note']})" if model["note"] else ""
    skipped = f", {len(left_out):,} left out ({left_out[0]['id']}: {left_out[0]['reason']})" if left_out else ""
    facts = {
        "signal": f"{found['signal']} against {found['intervention']} labels",
        "model": f"{model['name']}{note}, {model['n_layers']} layers",
        "traces": f"{found['n_traces']:,} ({found['n_discover']:,} to discover, {found['n_confirm']:,} to confirm), "
        f"{found['n_tokens']:,} tokens{skipped}",
    }
    lines = [columns(facts)]
    if found["bands"]:
        lines += ["", table(*_table(found["bands"]), right=(2, 3)), ""]
    lines += [columns({"largest": _largest(found), "verdict": f"{found['verdict']}: {found['reason']}"})]
    lines += [_moved(move, found["compare"]["other"]["path"]) for move in found.get("compare", {}).get("moves", [])]
    return "\n".join([*lines, columns({"run": path})])


def _largest(found: dict[str, Any]) -> str:
    """The layer with the largest mean, and what a mean has to exceed to be seen."""
    one, width = found["largest"], found["half_width"]
    seen = f"; a layer's interval reaches {number(width, '.2f')} to each side" if width is not None else ""
    size = f"{number(one['mean_rho'])} {interval(one['low'], one['high'])}"
    return f"layer {one['layer']}: {size}, chosen for its size{seen}"


def _table(bands: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The headers and rows that show the bands."""
    headers = ["layers", "depth", "rho discovered", "rho confirmed", "95 % interval", "confirmed"]
    rows = []
    for band in bands:
        rows.append(
            [
                f"[{band['start']}, {band['stop']})",
                f"{band['depth_start']:.2f} to {band['depth_stop']:.2f}",
                number(band["discover_rho"]),
                number(band["confirm_rho"]),
                interval(band["confirm_low"], band["confirm_high"]),
                "yes" if band["confirmed"] else "no",
            ]
        )
    return headers, rows


def _moved(move: dict[str, Any], other: str) -> str:
    """Whether the band of one sign moved, in a line."""
    head = f"{'moved'.ljust(12)}  {'positive' if move['sign'] > 0 else 'negative'} band: "
    if move["moved"] is None:
        return f"{head}cannot say ({move['reason']})"
    centre = move["centre"]
    by = f"centre {number(centre['difference'])} of the depth {interval(centre['low'], centre['high'])}"
    return f"{head}{'yes' if move['moved'] else 'no'}, {by} against {other}"
