"""How does a model write? Its own generation loop under settings that say everything, seeded for each text.

1. `stop_ids`: the tokens that end a text, from the generation config (one id or a list) and the tokenizer.
2. `generate`: greedy or sampled continuation of one prompt. What a checkpoint's generation config would mix in (top-k,
   penalties, beams) is set aside, so that the settings recorded are the settings used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvlens.causal_lm import Model


def stop_ids(model: Model) -> frozenset[int]:
    """The token ids that end a text of this model; empty where it names none."""
    found: set[int] = set()
    for source in (getattr(model.hf, "generation_config", None), model.tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([] if ids is None else ids if isinstance(ids, (list, tuple)) else [ids])
    return frozenset(map(int, found))


@torch.no_grad()
def generate(
    model: Model,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    streamer: Any = None,
) -> list[int]:
    """The ids that the model writes after `prompt`, up to and without the one that ends the text.

    Args:
        temperature: 0 takes the likeliest token; else tokens are drawn from the whole softmax at this temperature.
        seed: of the draws; the global random state is left as it was.
        streamer: one of transformers', told of the prompt and of every token as it comes, the one that ends included.

    Cost: one prefill and a forward pass a token.
    """
    stops = sorted(stop_ids(model))
    sampling = {"do_sample": True, "temperature": float(temperature), "top_k": 0, "top_p": 1.0} if temperature else {}
    ids = torch.tensor([list(prompt)], device=model.device)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        written = model.hf.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,
            streamer=streamer,
            **{"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0} | sampling,
        )
    new = written[0, len(prompt) :].tolist()
    return new[:-1] if new and new[-1] in stops else new
