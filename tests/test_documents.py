"""Are the documents of a run (`bands.json` and its kin) as safe as its tables?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from kvlens.errors import InputError
from kvlens.loading import load
from kvlens.runstate import sealed
from kvlens.schemas import AGREEMENT_TABLES, BANDS, DOCUMENTS, RANKING_TABLES, SCHEMAS
from kvlens.store import RunFolder, open_run

CONTENT = {"schema": BANDS, "rho": [0.5, float("nan")], "verdict": "no band"}


def start(out: Path, *, seed: int = 0, force: bool = False) -> RunFolder:
    model = {"name": "m", "fingerprint": "f", "note": ""}
    return open_run(
        out, schema=BANDS, config={}, model=model, input_hash="i", seed=seed, dtype="float32", force=force
    )  # fmt: skip


@pytest.fixture
def out(tmp_path: Path) -> Path:
    with start(tmp_path / "out") as run:
        run.finish({}, documents={"bands": CONTENT})
    return tmp_path / "out"


def test_a_document_comes_back_with_nan_as_null(out: Path) -> None:
    run = load(out)
    assert run.documents == {"bands": CONTENT | {"rho": [0.5, None]}}
    assert run.tables == {}
    assert sorted(path.name for path in out.iterdir()) == ["bands.json", "run.json"]
    assert run.meta["documents"]["bands"]["bytes"] == (out / "bands.json").stat().st_size
    with start(out) as again:
        assert again.complete


def test_runs_without_documents_load_as_before(tmp_path: Path, out: Path) -> None:
    state = json.loads((out / "run.json").read_text())
    del state["documents"]
    (out / "run.json").write_text(json.dumps(sealed(state)))
    assert load(out).documents == {}


def test_stacked_runs_keep_their_documents_apart(tmp_path: Path, out: Path) -> None:
    with start(tmp_path / "other", seed=1) as run:
        run.finish({}, documents={"bands": {"schema": BANDS, "verdict": "bands"}})
    both = load([out, tmp_path / "other"])
    assert {name: found["bands"]["verdict"] for name, found in both.documents.items()} == {
        "out": "no band",
        "other": "bands",
    }


def change(path: Path) -> None:
    path.write_text(path.read_text().replace("no band", "bands  "))


@pytest.mark.parametrize("harm", [change, Path.unlink])
def test_a_changed_or_lost_document_is_refused(out: Path, harm: Callable[[Path], None]) -> None:
    harm(out / "bands.json")
    with pytest.raises(InputError, match=r"bands\.json is missing, damaged or changed"):
        load(out)


def test_a_finished_run_that_lost_its_document_says_so_and_force_writes_it_anew(out: Path) -> None:
    (out / "bands.json").unlink()
    with pytest.raises(InputError, match=r"bands\.json' is missing"):
        start(out)
    with start(out, force=True) as run:
        run.finish({}, documents={"bands": CONTENT})
    assert load(out).documents["bands"]["verdict"] == "no band"


def test_force_clears_the_document_of_another_run(out: Path) -> None:
    with start(out, seed=1, force=True):
        assert not (out / "bands.json").exists()


def test_every_schema_with_documents_is_known_and_its_columns_are_fixed() -> None:
    assert set(DOCUMENTS) <= set(SCHEMAS)
    measures = ("rho", "raw_rho", "auc_size", "auc_signed", "adds_rho", "adds_auc", "drops_rho", "drops_auc")
    assert RANKING_TABLES["ranking"].names == [
        "signal", "choice", "traces", "n_traces", "n_undefined", "layer", "depth", "causal",
        *[f"{name}{end}" for name in measures for end in ("", "_low", "_high")],
    ]  # fmt: skip
    assert AGREEMENT_TABLES["agreement"].names == [
        "trace_id", "n_tokens", "n_above_noise", "spearman", "top_tenth_overlap", "sign_agreement",
    ]  # fmt: skip
    assert RANKING_TABLES["ranking"].field("layer").type == pa.int32()
