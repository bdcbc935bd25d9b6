"""What does an error say? One line, and the next step on another where there is one."""

from __future__ import annotations

from kvlens.errors import InputError


def test_in_python_the_hint_is_read_too() -> None:
    error = InputError("it failed", "mend it")
    assert str(error).splitlines() == ["it failed", "hint: mend it"]
    assert (error.message, error.hint) == ("it failed", "mend it")
    assert str(InputError("it failed")) == "it failed"
