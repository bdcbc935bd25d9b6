"""Are the notebooks what their percent files say? Writes (or with `--check` compares) every notebooks/NN_*.ipynb.

The percent file is the one people edit; the .ipynb is generated from it, without outputs and with cell ids that
count the cells, so that the same text always gives the same bytes and a check can compare them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
import nbformat

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def generated(percent: Path) -> str:
    """Returns the text of the notebook that belongs to a percent file."""
    notebook = jupytext.read(percent, fmt="py:percent")
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def main() -> None:
    """Writes the notebooks; with `--check` exits 1 and names those that differ or have no percent file."""
    wanted = {percent.with_suffix(".ipynb"): generated(percent) for percent in sorted(FOLDER.glob("[0-9]*.py"))}
    if "--check" not in sys.argv[1:]:
        for path, text in wanted.items():
            path.write_text(text, encoding="utf-8")
        return
    there = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.ipynb")}
    wrong = [path.name for path in sorted(wanted.keys() | there.keys()) if wanted.get(path) != there.get(path)]
    if wrong:
        sys.exit(f"error: not generated from their percent files: {', '.join(wrong)}\nhint: make notebooks")


if __name__ == "__main__":
    main()
