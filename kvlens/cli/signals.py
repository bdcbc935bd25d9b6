"""`kvlens signals`: which signals tell which tokens matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlens.cli import options
from kvlens.cli.output import Output, columns, interval, number, table
from kvlens.wording import counted

if TYPE_CHECKING:
    from kvlens.loading import Run


def command(
    labels: options.Labels,
    signals: options.Signals,
    out: options.Out,
    audit_only: options.AuditOnly = False,
    seed: options.Seed = 0,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Rank signals by how well they tell which tokens matter beyond position, and fit a score of streaming ones."""
    from kvlens.discover import ranking

    run = ranking.signals(labels, signals, out, audit_only=audit_only, seed=seed, force=force)
    rows = run.ranking[run.ranking.choice != ranking.EACH]
    fitted = run.documents["fitted"]
    document = {"run": run.path, "counts": run.meta["counts"], "ranking": rows.to_dict("records"), "fitted": fitted}
    Output(json, quiet).answer(document, text=_text(run, rows.to_dict("records"), fitted), paths=[run.path])


def _text(run: Run, rows: list[dict[str, Any]], fitted: dict[str, Any]) -> str:
    counts, model = run.meta["counts"], fitted["model"]
    note = f" ({model['note']})" if model["note"] else ""
    few = ", few: intervals are rough" if run.meta["results"]["few_traces"] else ""
    facts = {
        "labels": f"{fitted['intervention']}, {model['name']}{note}",
        "traces": f"{counts['traces']:,} ({counts['confirm_traces']:,} to report the chosen layer){few}, "
        f"{counts['tokens']:,} tokens",
    }
    lines = [
        columns(facts),
        "",
        table(*_table(rows), right=(1, 2, 3, 5, 6, 7)),
        "",
        f"Each interval stands by itself: of {len(rows)} signals, one in twenty leaves out 0 by chance.",
        "",
    ]
    if fitted["held_out"] is not None:
        ridge, logistic = (fitted["held_out"]["score"][name] for name in ("ridge_rho", "logistic_auc"))
        n_fitted = counted(len(fitted["features"]), "streaming signal")
        score = {
            "fitted": f"{n_fitted}, in held-out traces and beyond position:",
            "  ridge": f"rho {number(ridge['mean'])} {interval(ridge['low'], ridge['high'])}",
            "  logistic": f"AUC for the top tenth {number(logistic['mean'], '.2f')} "
            f"{interval(logistic['low'], logistic['high'], '.2f')}",
            "  verdict": _worth(fitted["held_out"]["beyond_position"]["auc"]),
        }
        lines.append(columns(score))
    return "\n".join([*lines, columns({"run": run.path})])


def _worth(beyond: dict[str, Any]) -> str:
    """Whether the signals add to knowing the position, by the AUC in held-out traces."""
    by = f"{number(beyond['mean'], '+.3f')} AUC {interval(beyond['low'], beyond['high'], '+.3f')}"
    if beyond["low"] is not None and beyond["low"] > 0:
        return f"adds to knowing the position: {by}"
    return f"not shown to add to knowing the position ({by}): do not build a policy on it"


def _table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The headers and rows that compare signals."""
    headers = ["signal", "layer", "n", "rho", "95 % interval", "AUC size", "AUC signed", "adds AUC", "causal"]
    known = {True: "yes", False: "no"}
    shown = [
        [
            row["signal"],
            str(row["layer"]) if isinstance(row["layer"], int) else "",
            str(row["n_traces"]),
            number(row["rho"]),
            interval(row["rho_low"], row["rho_high"]),
            number(row["auc_size"], ".2f"),
            number(row["auc_signed"], ".2f"),
            number(row["adds_auc"], "+.3f"),
            known.get(row["causal"], "?"),
        ]
        for row in rows
    ]
    return headers, shown
