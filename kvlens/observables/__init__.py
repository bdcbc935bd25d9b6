"""Cheap signals of every token: pure tensor functions, one signal or one tight family a file, listed in `table.py`.

Each file offers `init() -> state` and `step(state, chunk) -> (state, values)` for a chunk of one or more new tokens.
The state is frozen, so whoever decodes can carry, copy or drop it. A signal that needs tokens still to come gives its
values late; `finish(state)` gives the rest once no more are coming. A whole trace is one chunk (`Signal.whole`), and
cutting it into chunks changes no value. Numbers are float32 or wider inside whatever comes in.
"""
