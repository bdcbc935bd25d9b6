"""The `kvlens` command: verbs in the order of the flow, and which error gives which exit code.

1. Only the verb that is named on the command line is imported; for the others `--help` needs the table below alone.
2. The verb runs; its answer leaves through `output.Output`.
3. Any error becomes two lines on stderr and an exit code: 0 done, 1 the verdict is no, 2 bad usage or input, 3 the
   environment lacks something, 70 a bug, 130 interrupted.

A new verb is one file in `kvlens/cli/` with a function `command`, and one row in `VERBS`.
"""

from __future__ import annotations

import errno
import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer

from kvlens import __version__
from kvlens.cli import output
from kvlens.errors import KvlensError


class Verb(NamedTuple):
    """One verb: its name, the module whose `command` runs it, and its line in `--help`."""

    name: str
    module: str
    summary: str


VERBS = (
    Verb("traces", "kvlens.cli.traces", "Let a model answer prompts: its own traces, split and graded."),
    Verb("label", "kvlens.cli.label", "Measure how much each cached token matters to the answer."),
    Verb("observe", "kvlens.cli.observe", "Read cheap signals of each token off one forward pass."),
    Verb("bands", "kvlens.cli.bands", "Find the layers whose signal goes with importance."),
    Verb("signals", "kvlens.cli.signals", "Rank signals by how well they tell which tokens matter."),
    Verb("compare-labels", "kvlens.cli.compare_labels", "Compare two label runs of the same traces."),
    Verb("ceilings", "kvlens.cli.ceilings", "Measure how much any choice of kept keys could gain over the largest."),
    Verb("surprise", "kvlens.cli.surprise", "Score tokens by what the future cannot predict, and evict by it."),
    Verb("export", "kvlens.cli.export", "Write a policy file from a finding, or from named parameters."),
    Verb("generate", "kvlens.cli.generate", "Let a model write under a policy that really evicts."),
    Verb("audit", "kvlens.cli.audit", "Compare what methods claim to hold with what they hold, and what it costs."),
    Verb(
        "inspect",
        "kvlens.cli.inspect",
        "Show what stands out in a run of labels or surprise, as a table or a page.",
    ),
    Verb("doctor", "kvlens.cli.doctor", "Report versions, device, attention backends and whether hooks bite."),
    Verb("models", "kvlens.cli.models", "List the models in the cache folder."),
)

INTERNAL, INTERRUPTED = 70, 130
AT_ONCE = ("export", "generate", "inspect")  # verbs that write at their end or not at all
DEBUG = "--debug"
EPILOG = f"{DEBUG}, anywhere, adds the traceback to an error."
_LACKING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOMEM}
_SHOWN = 60  # characters of a name that is too long
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the command line `arguments` (default: the process's own)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in words
    words = [word for word in words if word != DEBUG] or ["--help"]
    try:
        with output.telling_log("--quiet" in words):
            code = _build(words)(words, prog_name="kvlens", standalone_mode=False)
        output.flush()
    except SystemExit:  # typer's answer to a reader that closed the pipe while it printed help
        output.drop_stdout()
        return 0
    except BaseException as error:
        code, message, hint = _explain(error)
        output.error(message, hint)
        if debug:
            output.note(traceback.format_exc().rstrip())
    if code == INTERRUPTED:
        again = "nothing was written, run it again"
        hint = again if words[0] in AT_ONCE else "the same command continues where it stopped"
        output.error("interrupted", hint)
    return code if isinstance(code, int) else 0


def _build(words: Sequence[str]) -> typer.Typer:
    """The typer application with the verbs named in `words` imported and the others as a name and a summary."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=EPILOG,
    )
    app.callback()(_top)
    for verb in VERBS:
        run = importlib.import_module(verb.module).command if verb.name in words else _not_named
        app.command(verb.name, short_help=verb.summary, epilog=EPILOG)(run)
    return app


def _print_version(asked: bool) -> bool:
    if asked:
        output.Output().answer(__version__, text=f"kvlens {__version__}")
        raise typer.Exit()
    return asked


def _top(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Which cached tokens matter, what shows it, and what a KV-cache policy really costs and keeps."""


def _not_named() -> None:
    """Stands for a verb that this command line does not name, and so cannot run."""


def _explain(error: BaseException) -> tuple[int, str, str]:
    """The exit code, the line of error and the line of hint for `error`."""
    if isinstance(error, KvlensError):
        return error.exit_code, error.message, error.hint
    if isinstance(error, typer.TyperException):
        command = getattr(getattr(error, "ctx", None), "command_path", None) or "kvlens"
        return (
            2,
            _one_line(error.format_message()).replace("Value error, ", ""),
            f"{command} --help lists what it takes",
        )
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return INTERRUPTED, "", ""
    if isinstance(error, MemoryError) or _is_out_of_memory(error):
        return (
            3,
            f"out of memory: {_one_line(error)}",
            "use shorter traces (--limit, --target-tokens) or a larger machine",
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return 2, f"{error.strerror}: '{str(error.filename)[:_SHOWN]}...'", "give a shorter path or name"
    if isinstance(error, OSError) and error.errno in _LACKING:
        where = f" '{error.filename}'" if error.filename else ""
        return 3, f"{error.strerror}{where}", "check the free space and the permissions there"
    return (
        INTERNAL,
        f"internal error: {type(error).__name__}: {_one_line(error)}",
        "--debug shows the traceback to report",
    )


def _is_out_of_memory(error: BaseException) -> bool:
    """True for torch's ways to say so; torch itself is not imported here."""
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def _one_line(message: object) -> str:
    return " ".join(str(message).split()) or type(message).__name__
