"""`python -m kvlens`: the same as the `kvlens` command."""

from __future__ import annotations

import sys

from kvlens.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
