"""One trace of a label run: which windows, in which batches, with what noise.

1. list the windows (fixed width and stride, or units of the text) and pack their counterfactuals into batches;
2. screen first if asked: score all windows by gradient, measure the top and an audit sample, widen under `auto`;
3. run every batch that has no part yet, in pieces if memory ran out, and write it as a part;
4. check that hiding nothing changes nothing, and recompute some windows another way: the noise floor;
5. turn windows into token values, and leave the trace's own row last.

Every step looks for what an earlier start of the run left and computes only what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import pandas as pd
import torch

from kvlens import model as models
from kvlens.errors import ModelRefused
from kvlens.linear import default_linear
from kvlens.model import Model
from kvlens.probe import budget, generation, noise, screen, subsets
from kvlens.probe.deletion import DeletionOccluder
from kvlens.probe.occlusion import Counterfactual, Engine, Occluder, make_batches, total_tokens
from kvlens.probe.readout import Effects, Metric
from kvlens.probe.settings import AUTO, Settings
from kvlens.probe.tables import mean_over_windows, subset_rows, token_rows
from kvlens.probe.windows import first_positions, list_windows, windows_in
from kvlens.records import Tokens
from kvlens.store import RunFolder

Report = dict[str, Any]
Result = TypeVar("Result")


class TraceMeasurement:
    """The measurement of one trace inside a label run; `keys` lists its parts in the order of the tables."""

    def __init__(self, run: RunFolder, model: Model, tokens: Tokens, settings: Settings, metric: Metric | None) -> None:
        self.run, self.model, self.tokens, self.settings, self.metric = run, model, tokens, settings, metric
        self.how = settings.how(model)
        self.windows = list_windows(tokens, settings)
        self._firsts = first_positions(tokens, self.windows, self.how)
        self._index = {window: i for i, window in enumerate(self.windows)}
        self.keys: dict[str, list[str]] = {"windows": [], "tokens": [self.id], "traces": [self.id]}
        self._engine: Engine | None = None
        self._batch_sizes: set[int] = set()

    @property
    def id(self) -> str:
        """The trace's id, which is also the key of its parts."""
        return self.tokens.trace.id

    @property
    def n_windows(self) -> int:
        """How many windows the trace has, screened out or not."""
        return len(self.windows)

    @property
    def finished(self) -> bool:
        """Whether an earlier start of this run measured the whole trace."""
        return self.id in self.run.plan.get("reports", {})

    def occluder(self) -> Engine:
        """The engine over this trace, built on first use."""
        if self._engine is None:
            self._engine = self._new_engine()
        return self._engine

    def _new_engine(self) -> Engine:
        kind = DeletionOccluder if models.ignores_masks(self.model) else Occluder
        return kind(self.model, self.tokens, self.how, metric=self.metric)

    def n_compute(self) -> int:
        """How many tokens measuring every window takes."""
        return total_tokens(self._batches(range(self.n_windows)), self._firsts, self.tokens.n_tokens - 1)

    def measure(self, tick: Callable[[int], None]) -> Report:
        """The trace's report, once every part of it is written; `tick` is told how many windows are done."""
        report: Report = {"trace_id": self.id}
        if not self.finished:
            report["nothing_hidden_nats"] = self._check_nothing_hidden()
        if self.settings.screen is None:
            self._run_stage("", dict.fromkeys(range(self.n_windows), "all"), tick)
        else:
            report["screen"] = self._screened(tick)
        if self.settings.flips:
            report["flips"] = self._full_answer()
        if self.settings.random_subsets:
            report["subsets"] = self._run_subsets()
        if not self.run.has_part("tokens", self.id):
            self.run.write_part("tokens", self.id, token_rows(self.tokens, self.model.tokenizer, self._measured()))
        if self.finished:
            report = dict(self.run.plan["reports"][self.id])
        else:
            report |= self._noise()
        if not (self.finished and self.run.has_part("traces", self.id)):
            self.run.write_part("traces", self.id, self._trace_row(report))
            self._remember("reports", report)
        self._engine = None  # this trace's prefix cache goes before the next one's comes
        return report

    def _batches(self, indices: Sequence[int]) -> list[list[int]]:
        """The windows packed into batches by the run's plan."""
        firsts = [self._firsts[i] for i in indices]
        packed = make_batches(firsts, self.tokens.n_tokens - 1, int(self.run.plan["rows"]))
        return [[indices[i] for i in batch] for batch in packed]

    def _run_stage(self, stage: str, chosen: dict[int, str], tick: Callable[[int], None]) -> None:
        """Nothing; measures the chosen windows (index: selected_by), a part for each batch of the plan."""
        done = 0
        for number, members in enumerate(self._batches(sorted(chosen))):
            key = f"{self.id}/{stage}{number}"
            self.keys["windows"].append(key)
            self._batch_sizes.add(len(members))
            if not self.run.has_part("windows", key):
                self.run.write_part("windows", key, self._window_rows(members, chosen))
            done += len(members)
            tick(done)

    def _window_rows(self, members: list[int], chosen: dict[int, str]) -> dict[str, Any]:
        """The rows of one batch, measured now."""
        batch = [self.occluder().counterfactual(self.windows[i]) for i in members]
        effects, full = self._effects(batch), self.occluder().reference
        lost = full.log_probs - effects.log_probs  # [row, target]
        rows: dict[str, Any] = {
            "trace_id": self.id,
            "window_start": [self.windows[i][0] for i in members],
            "window_end": [self.windows[i][1] for i in members],
            "intervention": self.how.kind,
            "cells": self.settings.cells,
            "selected_by": [chosen[i] for i in members],
            "effect_nats": lost.sum(-1).numpy(),
            "kl_nats": effects.kl_nats.numpy(),
            "lag": self.how.lag,
        }
        if self.settings.per_target:
            rows["per_target"] = list(lost.float().numpy())
        if effects.metric is not None and full.metric is not None:
            rows["metric_effect"] = (full.metric - effects.metric).numpy()
        if self.settings.flips:
            rows["flipped"] = self._flips(batch)
        return rows

    def _effects(self, batch: Sequence[Counterfactual]) -> Effects:
        """The batch's effects, in pieces where memory ran out."""
        pieces = self._in_pieces(batch, self.occluder().run)
        metrics = [piece.metric for piece in pieces if piece.metric is not None]
        return Effects(
            torch.cat([piece.log_probs for piece in pieces]),
            torch.cat([piece.kl_nats for piece in pieces]),
            torch.cat(metrics) if metrics else None,
        )

    def _in_pieces(
        self, batch: Sequence[Counterfactual], run: Callable[[Sequence[Counterfactual]], Result]
    ) -> list[Result]:
        """What `run` gives for the pieces of the batch; a split that memory forces is kept for what follows."""

        def on_split(pieces: int) -> None:
            self.run.save_plan(self.run.plan | {"split": pieces})
            self.run.add_event("out of memory", trace_id=self.id, pieces=pieces)

        return budget.run_halving(batch, run, self._pieces(len(batch)), on_split)

    def _pieces(self, n_rows: int) -> int:
        """Into how many pieces a batch goes."""
        return min(int(self.run.plan["split"]), n_rows)

    def _flips(self, batch: Sequence[Counterfactual]) -> Sequence[bool | None]:
        answer = self._full_answer()
        if answer["compared"] == "nothing":
            return [None] * len(batch)
        engine = self._masking_engine()
        pieces = self._in_pieces(batch, lambda rows: generation.flips(engine, rows, answer["full_answer"]))
        return [flip for piece in pieces for flip in piece]

    def _full_answer(self) -> dict[str, str]:
        """What the full cache answers, and what of it can be compared; kept in the plan for a continued run."""
        known: dict[str, dict[str, str]] = self.run.plan.get("answers", {})
        if self.id not in known:
            engine = self._masking_engine()
            text = generation.full_answer(engine)
            known = {self.id: {"full_answer": text, "compared": generation.compared(engine, text)}}
            self._remember("answers", known[self.id])
        return known[self.id]

    def _masking_engine(self) -> Occluder:
        """The engine, which honours masks: `settings.fit` refused flips and screens on a backend that does not."""
        return cast(Occluder, self.occluder())

    def _check_nothing_hidden(self) -> float:
        """The effect in nats of hiding nothing, which must be 0 to the last bit: the sanity row of every trace."""
        engine = self.occluder()
        last = self.tokens.n_context - 1
        again = engine.run([Counterfactual(last, last, np.zeros(self.tokens.n_tokens - 1, dtype=bool))])
        worst = float((again.log_probs[0] - engine.reference.log_probs).abs().max())
        if worst != 0:
            raise ModelRefused(
                f"{self.id}: hiding nothing changed the log-probabilities by {worst:.3g} nats",
                "the model is not deterministic here; use one thread or --device cpu",
            )
        return worst

    def _measured(self) -> pd.DataFrame:
        """The windows measured so far, in the order of their parts."""
        return pd.concat([self.run.read_part("windows", key) for key in self.keys["windows"]], ignore_index=True)

    def _screened(self, tick: Callable[[int], None]) -> Report:
        """The screen's report; its windows end up in one part, labelled by the last stage.

        The selection of every stage is kept in the plan, so that a continued run makes the same one.
        """
        final = f"{self.id}/screened"
        if self.finished and self.run.has_part("windows", final):
            self.keys["windows"] = [final]
            return dict(self.run.plan["reports"][self.id]["screen"])
        by_layer = screen.layer_scores(self._masking_engine(), self.windows)
        rank = screen.screening_rank(by_layer)
        auto = self.settings.screen == AUTO
        fraction: float | None = screen.FRACTIONS[0] if auto else float(self.settings.screen or 1)
        stages: list[dict[str, list[int]]] = list(self.run.plan["selected"].get(self.id, []))
        number, seen = 0, set[int]()
        selection: screen.Selection | None = None
        while fraction is not None:
            if number == len(stages):
                chosen = screen.choose(rank, fraction, self.settings.seed, self.windows, previous=selection)
                stages.append({"top": chosen.top.tolist(), "audit": chosen.audit.tolist()})
                self._remember("selected", stages)
            previous, selection = selection, screen.Selection.from_plan(stages[number])
            fresh = {*selection.top.tolist(), *selection.audit.tolist()} - seen
            if fresh:
                self._run_stage(f"screen{number}-", dict.fromkeys(fresh, "screen"), tick)
            seen |= fresh
            measured = self._measured()
            where = [self._index[window] for window in windows_in(measured)]
            effects = dict(zip(where, measured.effect_nats.tolist(), strict=True))
            scores = by_layer.sum(0)
            report = screen.report(scores, effects, selection, self.windows, previous=previous)
            report["fraction"] = fraction
            fraction = screen.widen(fraction, report) if auto else None
            number += 1
        audited = set(stages[number - 1]["audit"])
        measured["selected_by"] = ["audit" if i in audited else "screen" for i in where]
        self.run.write_part("windows", final, measured.iloc[np.argsort(where)])
        self.keys["windows"] = [final]
        return report

    def _noise(self) -> Report:
        """The differences that another batch shape and kernel, and for half precision float32, make to some windows."""
        usual = {-(-size // self._pieces(size)) for size in self._batch_sizes}
        measured = self._measured()
        rows = measured.iloc[noise.spread(range(len(measured)))]
        windows, effects = windows_in(rows), rows.effect_nats.to_numpy()
        found: Report = {"noise": []}
        try:
            with default_linear():
                engine = self._new_engine() if noise.has_two_kernels(self.model) else self.occluder()
                found["noise"] = np.abs(noise.recompute(engine, windows, usual) - effects).tolist()
            if noise.is_half(self.model):
                exact = noise.in_float32(noise.fp32_copy(self.model), self.tokens, self.how, windows)
                found["noise_fp32"] = np.abs(exact - effects).tolist()
        except (MemoryError, RuntimeError) as error:
            if not budget.is_out_of_memory(error):
                raise
            self.run.add_event("no memory to measure the noise floor with", trace_id=self.id)
        return found

    def _run_subsets(self) -> Report:
        """The surrogate's report; the masks and their effects become a part of the table `subsets`."""
        self.keys["subsets"] = [self.id]
        if self.finished and self.run.has_part("subsets", self.id):
            return dict(self.run.plan["reports"][self.id]["subsets"])
        kept = subsets.draw_masks(self.tokens, self.settings.random_subsets, self.settings.seed)
        if not self.run.has_part("subsets", self.id):
            everything = [subsets.as_counterfactual(self.tokens, mask) for mask in kept]
            size = max(1, int(self.run.plan["rows"]) // self.tokens.n_target)
            pieces = [self._effects(everything[lo : lo + size]) for lo in range(0, len(kept), size)]
            lost = self.occluder().reference.log_probs.sum() - torch.cat([p.log_probs for p in pieces]).sum(-1)
            self.run.write_part("subsets", self.id, subset_rows(self.id, kept, lost.numpy()))
        effects = self.run.read_part("subsets", self.id).effect_nats.to_numpy()
        alone = mean_over_windows(self.tokens.n_context, self._measured())
        return subsets.fit_surrogate(kept, effects, alone)

    def _trace_row(self, report: Report) -> dict[str, Any]:
        return {
            "trace_id": [self.id],
            "n_tokens": [self.tokens.n_tokens],
            "n_target": [self.tokens.n_target],
            "log_prob_full": [float(self.occluder().reference.log_probs.sum())],
            "noise_nats": [max([*report["noise"], *report.get("noise_fp32", [])], default=np.nan)],
        }

    def _remember(self, name: str, value: Any) -> None:
        """Nothing; keeps a JSON value of this trace in the run's plan."""
        self.run.save_plan(self.run.plan | {name: self.run.plan.get(name, {}) | {self.id: value}})
