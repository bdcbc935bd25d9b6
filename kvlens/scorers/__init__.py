"""How much is each cached token worth? One method a file, one row each in `table.py`; `interface.py` says the rules."""
