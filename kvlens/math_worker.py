"""Are two mathematical expressions equal? Decided by math-verify in a child process that a time limit can end.

1. The first call starts one child (this file, run as a script), which imports math-verify once and stays.
2. A question is one JSON line `[found, wanted]`, an answer one line `true` or `false`.
3. The child arms a watchdog before each question. It ends the process without asking the interpreter, so that even
   one endless integer power is cut off; the parent then reads no answer, counts the pair as unequal, and the next
   call starts a new child. math-verify's own limits rest on signals: main thread only, and powerless there.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import subprocess
import sys
from threading import Lock

LIMIT_SECONDS = 5.0
READY = ["\\boxed{\\frac12}", "\\boxed{0.5}"]  # a first question, with its answer known, shows that the packages work


def equivalent(found: str, wanted: str) -> bool:
    """Whether the expression in the text `found` equals the one in `wanted`; False if that takes too long to say.

    Raises:
        EnvironmentLacks: the math-verify package is missing or does not start.
    """
    return _CHILD.ask(found, wanted)


class _Child:
    """The child process, started by the first question and replaced when it has ended."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.process: subprocess.Popen[str] | None = None
        self.owner = -1  # the process that started it: a fork must not share its pipes

    def ask(self, found: str, wanted: str) -> bool:
        with self.lock:
            if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
                self.close()
                self.start()
            answer = self.exchange([found, wanted])
            if not answer:
                self.close()
            return answer == "true"

    def start(self) -> None:
        if self.owner != os.getpid():
            atexit.register(self.close)
        self.owner = os.getpid()
        command = [sys.executable, "-P", __file__]  # -P: this folder's file names must not hide other packages
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, encoding="utf-8")
        if self.exchange(READY) != "true":
            # here: the child has this file without the package around it
            from kvlens.errors import EnvironmentLacks
            from kvlens.wording import extra

            self.close()
            reason = "the math-verify package is missing or does not start"
            raise EnvironmentLacks(f"cannot compare mathematics: {reason}", extra("lens"))

    def exchange(self, pair: list[str]) -> str:
        """The child's answer; empty where it ended without one."""
        process = self.process
        if process is None or process.stdin is None or process.stdout is None:
            return ""
        try:
            process.stdin.write(json.dumps(pair) + "\n")
            process.stdin.flush()
            return process.stdout.readline().strip()
        except BrokenPipeError:
            return ""
        except BaseException:  # an interrupt between question and answer: the next answer would be this one's
            self.close()
            raise

    def close(self) -> None:
        """End the child, if this process has one."""
        process, self.process = self.process, None
        if process is not None and self.owner == os.getpid():
            process.kill()
            process.communicate()


_CHILD = _Child()


def _serve() -> None:
    """Answer the questions on stdin until it closes."""
    from math_verify import parse, verify

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the packages print goes elsewhere
    for line in sys.stdin:
        faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
        try:
            found, wanted = (parse(text, parsing_timeout=None) for text in json.loads(line))
            equal = bool(verify(wanted, found, timeout_seconds=None))
        except Exception:  # whatever a computer algebra system raises on strange input: no proof of equality
            equal = False
        faulthandler.cancel_dump_traceback_later()
        answers.write(json.dumps(equal) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
