"""Numbers in words: how many of what, how long, how large."""

from __future__ import annotations


def counted(n: int, noun: str, plural: str | None = None) -> str:
    """`1 trace`, `2 traces`; `plural` where an s is not enough."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def duration(seconds: int | float) -> str:
    """A time in the two units that matter: `40 s`, `3 min 20 s`, `2 h 5 min`."""
    if 0 < seconds < 1:
        return "under 1 s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(n_bytes: int | float) -> str:
    """Bytes in the decimal unit that leaves one to three digits before the point."""
    for unit in ("bytes", "kB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:,.0f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.1f} GB"


def extra(name: str) -> str:
    """What to do where a package of the extra `name` is missing."""
    return f'pip install ".[{name}]" in the folder of kvlens\' source'
