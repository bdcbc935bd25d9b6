"""The error tree: what went wrong, what to do next, and the exit code the CLI returns.

Every error a user can cause or meet carries one line of message (what was attempted, the offending value,
the reason) and one line of hint (the next step). The CLI prints both and exits with `exit_code`; anything
that is not a `KvlensError` is a bug and exits with 70.
"""

from __future__ import annotations


class KvlensError(Exception):
    """Base of every deliberate error; `exit_code` is what the CLI returns for it."""

    exit_code = 70

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Both lines: in Python nobody else prints the hint."""
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class VerdictNo(KvlensError):
    """The verb ran to its end and its answer is *no* (exit 1)."""

    exit_code = 1


class InputError(KvlensError):
    """Bad usage, file, schema or trace (exit 2)."""

    exit_code = 2


class EnvironmentLacks(KvlensError):
    """The machine lacks something: weights, an extra, a device, disk, permission (exit 3)."""

    exit_code = 3


class ModelRefused(KvlensError):
    """The model cannot give right numbers here: self-check mismatch, unsupported layer kind (exit 3)."""

    exit_code = 3
