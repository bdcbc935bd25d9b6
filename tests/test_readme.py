"""Do the README's examples run as they stand?"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import made_runs
import pytest
import torch
from lenses import require_transformer_lens
from matplotlib import pyplot as plt

import kvlens
from kvlens.cli.app import main
from kvlens.lens import Lens

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, start: str) -> list[str]:
    """The README's fenced blocks in a language whose first line starts like this."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [block for block in found if block.startswith(start)]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the project's data, so that what an example writes lands there."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.real
@pytest.mark.slow
def test_the_python_examples_run_and_their_words_hold(elsewhere: Path, smollm2: Any) -> None:
    require_transformer_lens()
    plt.switch_backend("agg")
    names: dict[str, Any] = {}
    examples = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len(examples) >= 1
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)  # noqa: S102
    plt.close("all")
    run, tl, tokens = names["run"], names["tl"], names["tokens"]
    assert isinstance(tl, Lens)
    assert run.traces.trace_id.tolist() == [tokens.trace.id]
    n_keys = tokens.n_tokens - 1
    pattern = names["cache"]["blocks.17.attn.hook_pattern"]
    assert pattern.shape == (1, tl.model.n_heads, n_keys, n_keys)
    row = run.windows.iloc[3]
    window, cut = (int(row.window_start), int(row.window_end)), tokens.n_context - 1
    assert tl.evict(tokens, window).effect_nats == pytest.approx(row.effect_nats, abs=1e-3)
    ids = torch.from_numpy(tokens.ids[:-1])[None]
    hidden = tl.bridge.run_with_hooks(ids, fwd_hooks=tl.hiding(window, cut))
    torch.testing.assert_close(hidden[:, :cut], names["logits"][:, :cut], atol=1e-3, rtol=0)
    assert (hidden[:, cut:] - names["logits"][:, cut:]).abs().max() > 0.01


def test_the_inspect_examples_run(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_runs.write(elsewhere / "runs" / "demo", {"kiln-firings": made_runs.APPLES}, {3: 2.0})
    commands = [line for block in blocks("", ".venv/bin/kvlens inspect") for line in block.splitlines()]
    assert len(commands) >= 3
    for command in commands:
        words = shlex.split(command, comments=True)
        assert words[0] == ".venv/bin/kvlens"
        assert main(words[1:]) == 0, capsys.readouterr().err
        assert "+2.00" in capsys.readouterr().out
    page = (elsewhere / "runs" / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"<script|https?:|src=", page)
    assert "kiln-firings" in page


@pytest.mark.real
@pytest.mark.slow
def test_the_way_from_texts_to_a_running_policy(elsewhere: Path, smollm2: Any) -> None:
    """As a shell runs it: label, observe, bands, export, generate."""
    (script,) = blocks("bash", "kvlens()")
    assert script.count(".venv/bin/kvlens") == 1
    script = script.replace(".venv/bin/kvlens", f"{shlex.quote(sys.executable)} -m kvlens")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no band" in done.stdout + done.stderr
    assert "held" in done.stderr
    policy = kvlens.read_policy("runs/deploy/epikv.json")
    assert (policy.scorer.name, policy.budget.tokens) == ("epikv", 64)


def test_every_name_of_kvlens_in_the_readme_exists() -> None:
    public = set(re.findall(r"`kvlens\.([a-z]\w*)", README))
    assert {"show", "plots"} <= public
    for name in public:
        module = ROOT / "kvlens" / name
        assert name in kvlens.__all__ or module.with_suffix(".py").is_file() or module.is_dir(), name


def test_the_numbers_are_those_of_the_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    spec = importlib.util.spec_from_file_location("tables", ROOT / "experiments" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert tables.updated(README) == README
