"""Do `import kvlens` and `kvlens --help` stay light?"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

import kvlens

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {
    "torch",
    "transformers",
    "transformer_lens",
    "pandas",
    "pyarrow",
    "numpy",
    "jaxtyping",
    "scipy",
    "datasets",
    "numba",
}


def modules_after(code: str) -> set[str]:
    """The top-level modules that are loaded after `code` ran in a new process."""
    code += "\nimport sys; print(' '.join(sorted({name.partition('.')[0] for name in sys.modules})), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def test_the_probe_sees_a_heavy_import() -> None:
    assert "numpy" in modules_after("import numpy")


def test_import_kvlens_is_light() -> None:
    loaded = modules_after("import kvlens")
    assert not loaded & (HEAVY | {"typer", "rich"})


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["inspect", "--help"],
        ["ceilings", "--help"],
        ["surprise", "--help"],
        ["export", "--help"],
        ["generate", "--help"],
        ["generate"],
        ["doctor", "--help"],
        ["no-such-verb"],
        ["models"],
    ],
)
def test_help_and_usage_errors_are_light(words: list[str]) -> None:
    assert not modules_after(f"from kvlens.cli.app import main; main({words!r})") & HEAVY


def test_only_the_named_verb_is_imported() -> None:
    code = "import sys; from kvlens.cli import app; app.main(['doctor', '--help'])\n"
    code += "print([verb.module for verb in app.VERBS if verb.module in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['kvlens.cli.doctor']"


def test_help_is_fast() -> None:
    """In processor time: what an idle machine makes one wait, and what a busy one does not change."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "kvlens", "--help"], cwd=ROOT, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert 0 < min(seconds) < 0.3


def test_public_names_are_found_and_others_are_not() -> None:
    assert set(kvlens.__all__) <= set(dir(kvlens))
    assert callable(kvlens.load)
    with pytest.raises(AttributeError, match="no_such_name"):
        kvlens.no_such_name  # noqa: B018


def test_plots_are_there_without_an_import_of_their_own_and_cost_nothing_before() -> None:
    assert "matplotlib" not in modules_after("import kvlens; kvlens.plots.cell_map")
    assert "kvlens" in modules_after("import kvlens; assert kvlens.plots.__name__ == 'kvlens.plots'")
