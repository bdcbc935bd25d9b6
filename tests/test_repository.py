"""Does the repository keep the promises it makes about itself?"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvlens

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvlens"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def readme_tree() -> dict[str, set[str]]:
    """The README's tree: each top-level folder with the files and folders named in the lines below it."""
    block = next(block for block in read("README.md").split("```") if block.lstrip().startswith("kvlens/"))
    tree: dict[str, set[str]] = {}
    for line in block.strip().splitlines():
        if line.startswith(" "):
            tree[list(tree)[-1]] |= set(re.findall(r"\w+\.py|(?<=^  )\w+/", line))
        else:
            tree[line.split()[0]] = set()
    return tree


def in_a_new_process(code: str) -> Any:
    """What `code` prints, read as JSON; a new process, so that nothing is imported yet."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_readme_and_makefile_name_the_same_targets() -> None:
    defined = set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE)) - {"help"}
    assert set(re.findall(r"^\| `make ([a-z]+)`", read("README.md"), re.MULTILINE)) == defined
    assert set(re.findall(r"make ([a-z]+) ", read(".ci/run"))) <= defined


def test_readme_tree_is_the_tree() -> None:
    tree = readme_tree()
    folders = {f"{path.name}/" for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))}
    assert folders - {"runs/", "shared/", "build/", "dist/"} <= set(tree)
    assert set(tree) - folders <= {"figures/"}  # git has no empty folders: it comes with the first figure
    entries = {path.name for path in PACKAGE.glob("*.py")} | {f"{path.parent.name}/" for path in PACKAGE.glob("*/*.py")}
    assert tree["kvlens/"] == entries - {"__init__.py"}


def test_version_stands_in_one_place() -> None:
    where = [
        path for path in [*PACKAGE.rglob("*.py"), ROOT / "pyproject.toml"] if kvlens.__version__ in path.read_text()
    ]
    assert where == [PACKAGE / "__init__.py"]


def test_every_dependency_is_pinned_to_a_version_its_range_allows() -> None:
    pins = dict(line.split("==") for line in read("constraints.txt").splitlines() if line and not line.startswith("#"))
    project = tomllib.loads(read("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    listed = [project["dependencies"], *(extras[name] for name in ("lens", "notebook", "presses", "dev"))]
    wanted = [Requirement(line) for lines in listed for line in lines]
    assert {canonicalize_name(requirement.name) for requirement in wanted} == set(pins)
    wrong = [
        str(requirement)
        for requirement in wanted
        if pins[canonicalize_name(requirement.name)] not in requirement.specifier
    ]
    assert not wrong


def test_public_names_mean_the_same_once_every_module_is_imported() -> None:
    everything = (
        "import importlib, pkgutil\n"
        "for found in pkgutil.walk_packages(kvlens.__path__, 'kvlens.'): importlib.import_module(found.name)\n"
    )
    names = "print(json.dumps({name: [type(getattr(kvlens, name)).__name__, getattr(kvlens, name).__module__]"
    names += " for name in kvlens.__all__ if not name.startswith('__')}))"
    alone = in_a_new_process(f"import json, kvlens\n{names}")
    assert "label" in alone
    assert {kind for kind, _ in alone.values()} <= {"function", "type", "ModelMetaclass"}
    assert in_a_new_process(f"import json, kvlens\n{everything}{names}") == alone


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") < 300
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert [node.name for node in functions if (node.end_lineno or 0) - node.body[0].lineno >= 50] == []
