"""Where does this checkout's Python live? Builds it once, then answers at once.

1. The dependencies named in pyproject.toml (core plus `--extras`) are installed, under the versions of
   constraints.txt, into a virtual environment in the user's cache folder. Its name is a hash of everything
   that decides its content, so a changed pin makes a new one and other checkouts share it. A file `complete`
   is written last: an environment without it was interrupted and is rebuilt.
2. `.venv` in the checkout is a thin environment that sees those dependencies and this checkout's `kvlens`,
   command included. Making it takes two seconds, so it is remade whenever either of the two moved.

With `--dependencies-only` step 2 is left out and the path of the interpreter of step 1 is printed.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIMUM = (3, 11)


def requirements(extras: list[str]) -> list[str]:
    """Returns the requirement strings of the core and of `extras`, an extra made of extras unfolded."""
    import tomllib  # not there before Python 3.11, whose users must still get the message of main()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found, queue = list(project["dependencies"]), list(extras)
    while queue:
        for requirement in project["optional-dependencies"][queue.pop(0)]:
            own = re.fullmatch(rf"{project['name']}\[(.+)\]", requirement)
            if own:
                queue += [name.strip() for name in own[1].split(",")]
            else:
                found.append(requirement)
    return found


def constraints(free: list[str]) -> str:
    """Returns the text of constraints.txt without the lines of the packages in `free`."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if line.split("==")[0].strip().lower() not in free)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path`, so that two builds of one environment wait for each other."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def dependencies(wanted: list[str], pins: str, upgrade: list[str]) -> Path:
    """Returns the folder of the dependency environment, building it where it is missing or incomplete."""
    python = f"{platform.python_implementation()} {sys.version} {sys.base_prefix} {platform.machine()}"
    key = hashlib.sha256("\n".join([python, *sorted(wanted), pins]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlens"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"venv-{key}"
    complete = folder / "complete"
    if complete.exists() and not upgrade:
        return folder
    with locked(cache / f"venv-{key}.lock"):
        if not complete.exists():
            print(f"installing {len(wanted)} dependencies into {folder} (once; minutes)", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            with_pip = importlib.util.find_spec("ensurepip") is not None
            venv.create(folder, symlinks=True, with_pip=with_pip)
        elif upgrade:
            complete.unlink()
        (folder / "constraints.txt").write_text(pins, encoding="utf-8")
        if (folder / "bin" / "pip").exists():
            pip = [str(folder / "bin" / "python"), "-m", "pip"]
        else:  # a Python without ensurepip (Debian's without python3-venv): let its own pip do it
            pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
        install = [*pip, "install", "-qq", "--disable-pip-version-check", "-c", str(folder / "constraints.txt")]
        subprocess.run([*install, "pip", *wanted], check=True)
        if upgrade:
            subprocess.run([*install, "--upgrade", *upgrade], check=True)
        complete.touch()
    return folder


def checkout(folder: Path, shared: Path) -> None:
    """Makes `folder` (this checkout's .venv) see the packages of `shared` and this checkout's kvlens."""
    made_for = folder / "kvlens-made-for"
    state = f"{shared}\n{ROOT}\n{hashlib.sha256((ROOT / 'pyproject.toml').read_bytes()).hexdigest()}\n"
    if made_for.exists() and made_for.read_text(encoding="utf-8") == state:
        return
    if folder.exists() and not made_for.exists():
        sys.exit(f"error: {folder} exists and was not made by this script\nhint: move or delete it")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    made_for.touch()  # first, so that an interrupted build is known as ours; its text comes last
    venv.create(folder, symlinks=True, with_pip=False)
    packages = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    line = f"import site; site.addsitedir({str(shared / packages)!r})\n"
    (folder / packages / "kvlens-dependencies.pth").write_text(line, encoding="utf-8")
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *offline]
    subprocess.run([*pip, "-e", str(ROOT)], check=True)
    for tool in (shared / "bin").iterdir():  # pytest, jupyter, ...: the same commands under this interpreter
        own, start = folder / "bin" / tool.name, f"#!{shared}/bin/python".encode()
        if own.exists() or tool.name.lower().startswith("activate"):
            continue
        text = tool.read_bytes()
        if text.startswith(start):
            own.write_bytes(text.replace(start, f"#!{python}".encode(), 1))
            own.chmod(0o755)
        else:
            own.symlink_to(tool)
    made_for.write_text(state, encoding="utf-8")


def main() -> None:
    """Parses the command line and reports a failed installation in one line."""
    if sys.version_info < MINIMUM:
        found = platform.python_version()
        sys.exit(f"error: kvlens needs Python 3.11 or newer, this is {found}\nhint: make PYTHON=python3.12 setup")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", default="all", help="comma-separated extras of pyproject.toml (default: all)")
    parser.add_argument("--add", action="append", default=[], metavar="REQ", help="one more requirement")
    parser.add_argument("--free", action="append", default=[], metavar="NAME", help="ignore the pin of this package")
    parser.add_argument("--upgrade", action="append", default=[], metavar="REQ", help="take its newest, every time")
    parser.add_argument("--dependencies-only", action="store_true", help="no .venv; print the interpreter's path")
    options = parser.parse_args()
    extras = [name for name in options.extras.split(",") if name]
    wanted = [*requirements(extras), *options.add, *options.upgrade]
    try:
        shared = dependencies(wanted, constraints(options.free), options.upgrade)
        if options.dependencies_only:
            print(shared / "bin" / "python")
        else:
            with locked(shared.with_suffix(".lock")):
                checkout(ROOT / ".venv", shared)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: the environment could not be built: {error}\nhint: see pip's message above, then repeat")


if __name__ == "__main__":
    main()
