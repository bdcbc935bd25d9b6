"""What does a cache hold while a model writes? A streamer that measures it after every new token.

It measures whatever cache it is given, with or without a policy on the model, so that the two can be laid side by side.
"""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from kvlens.runtime.cache import physical_bytes


class Meter(BaseStreamer):
    """Give it to `generate(..., past_key_values=cache, streamer=meter)`; `bytes[i]` is held after new token i.

    Cost: a look at every layer's storages for each token, about a ten-thousandth of a second.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.bytes: list[int] = []
        self._prompt_came = False

    def put(self, value: Tensor) -> None:  # noqa: ARG002 (transformers names it)
        """Takes the prompt, then one token at a time."""
        if self._prompt_came:
            self.bytes.append(physical_bytes(self.cache))
        self._prompt_came = True

    def end(self) -> None:
        """Nothing is left to measure."""
