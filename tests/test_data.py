"""Are the texts and labels this repository ships what their cards say?"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvlens.model import Model
from kvlens.schemas import LABELS_TABLES
from kvlens.texts import read_prompts, read_traces, tokenize

DATA = Path(__file__).parent.parent / "data"
LABELS = DATA / "labels"
KINDS = {"arithmetic", "logic", "late_fact", "distractor", "correction"}


@pytest.mark.parametrize("folder", ["traces", "labels"])
def test_the_card_names_every_file_with_its_hash(folder: str) -> None:
    card = (DATA / "README.md" if folder == "traces" else LABELS / "README.md").read_text()
    files = sorted([*(DATA / folder).glob("*.jsonl"), *(DATA / folder).glob("*.parquet")])
    assert files
    for file in files:
        assert file.name in card
        assert hashlib.sha256(file.read_bytes()).hexdigest() in card


def test_traces_are_of_every_kind_and_their_targets_state_the_answer() -> None:
    traces = read_traces(DATA / "traces" / "traces.jsonl")
    assert len(traces) >= 24
    assert {trace.meta["kind"] for trace in traces} == KINDS
    for trace in traces:
        assert trace.prompt
        assert trace.reasoning
        assert any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", trace.target) for answer in trace.answer), trace.id


def test_prompts_can_be_asked() -> None:
    prompts = read_prompts(DATA / "traces" / "prompts.jsonl")
    assert len(prompts) >= 20
    assert all(prompt.answer for prompt in prompts)


@pytest.mark.real
def test_texts_have_the_lengths_they_are_for(smollm2: Model) -> None:
    for trace in read_traces(DATA / "traces" / "traces.jsonl"):
        assert 150 <= tokenize(trace, smollm2.tokenizer).n_tokens <= 600, trace.id
    documents = read_traces(DATA / "traces" / "documents.jsonl")
    assert len(documents) == 8
    for document in documents:
        assert 1100 <= tokenize(document, smollm2.tokenizer).n_tokens <= 1500, document.id


@pytest.mark.parametrize("table", ["windows", "tokens", "traces"])
def test_released_labels_read_with_pandas_and_datasets(table: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'lens' is not installed")
    frame = pd.read_parquet(LABELS / f"{table}.parquet")
    loaded = datasets.load_dataset(str(LABELS), table, split="train", cache_dir=str(tmp_path))
    assert list(frame.columns) == LABELS_TABLES[table].names == loaded.column_names
    assert len(frame) == len(loaded) > 0
    assert (LABELS / f"{table}.parquet").stat().st_size <= 1_000_000


def test_released_labels_are_of_the_traces_beside_them() -> None:
    tokens, windows = (pd.read_parquet(LABELS / f"{table}.parquet") for table in ("tokens", "windows"))
    texts = {
        trace.id: trace.prompt + trace.reasoning + trace.target
        for trace in read_traces(DATA / "traces" / "traces.jsonl")
    }
    assert set(tokens.trace_id) == set(texts)
    for trace_id, text in texts.items():
        assert "".join(tokens[tokens.trace_id == trace_id].token) == text
    assert tokens[tokens.segment == "target"].effect_nats.isna().all()
    joined = tokens.merge(windows, left_on=["trace_id", "pos"], right_on=["trace_id", "window_start"])
    assert len(joined) == len(windows)
    np.testing.assert_array_equal(joined.effect_nats_x, joined.effect_nats_y)


def test_results_are_json_objects() -> None:
    for file in (DATA / "results").glob("*.json"):
        assert isinstance(json.loads(file.read_text()), dict)
