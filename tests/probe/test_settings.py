"""Options of a label run: what they become, and which contradict each other."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_runs

from kvlens.errors import InputError, KvlensError, ModelRefused
from kvlens.model import Model
from kvlens.probe.settings import Settings, as_config, fit, make_settings

MODEL = tiny_runs.model()


def made(model: Model = MODEL, metric: Any = None, **asked: Any) -> Settings:
    return fit(make_settings(asked.pop("preset", None), metric, **asked), model)


def logit_difference(logits: Any, targets: Any) -> Any:
    """Only its name matters here."""


def test_nothing_asked_is_evict_of_every_token_everywhere() -> None:
    assert made() == Settings(stride=1)
    assert made(intervention=None, window=None, cells=None) == made()
    assert made(window=7) == Settings(window=7, stride=7)
    assert made(window=7, stride=2).stride == 2


def test_the_preset_is_the_papers_and_options_win() -> None:
    found = made(preset="epikv")
    assert (found.intervention, found.window, found.stride) == ("substitute", 32, 16)
    assert (found.flips, found.only_correct, found.skip_prompt, found.filler) == (True, True, True, "randmulti")
    assert made(preset="epikv", window=8).window == 8
    assert made(preset="epikv", filler="random").filler == "random"
    assert made(preset="epikv", units="step").units == "step"


def test_cells_are_kept_in_one_spelling() -> None:
    assert made(cells="2, 0-1").cells == "all"
    assert made(cells="1:2,3,0;0").cells == made(cells="0;1:0,2-3").cells == "0;1:0,2-3"


def test_a_metric_is_known_by_its_name() -> None:
    assert made(metric=logit_difference).metric == f"{__name__}.logit_difference"
    assert made().metric is None


def test_the_configuration_is_json_and_the_seed_stands_apart() -> None:
    config = as_config(made(seed=3, screen=0.25, random_subsets=2))
    assert json.loads(json.dumps(config)) == config
    assert "seed" not in config
    assert config["screen"] == 0.25
    assert set(config) | {"seed"} == {field.name for field in dataclasses.fields(Settings)}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"preset": "other"}, "preset 'other'"),
        ({"intervention": "delete"}, "intervention 'delete'"),
        ({"window": 0}, "window 0"),
        ({"stride": 0}, "stride 0"),
        ({"target_tokens": 0}, "target_tokens 0"),
        ({"window": 2**31}, "window 2147483648"),
        ({"stride": 2**31}, "stride 2147483648"),
        ({"lag": 2**31}, "lag 2147483648"),
        ({"random_subsets": 100_001}, "random_subsets 100001"),
        ({"seed": -1}, "seed -1"),
        ({"window": 2.5}, "window 2.5 is of type float"),
        ({"window": True}, "window True is of type bool"),
        ({"stride": "3"}, "stride '3' is of type str"),
        ({"cells": 3}, "cells 3 is of type int"),
        ({"lag": 1.5}, "lag 1.5 is of type float"),
        ({"screen": True}, "screen True is of type bool"),
        ({"target_tokens": 1.5}, "target_tokens 1.5 is of type float"),
        ({"seed": 1.5}, "seed 1.5 is of type float"),
        ({"per_target": "no"}, "per_target 'no' is of type str"),
        ({"units": "word"}, "unit 'word'"),
        ({"units": "step", "window": 2}, "fixed width"),
        ({"units": "step", "stride": 2}, "fixed width"),
        ({"filler": "nothing", "intervention": "substitute"}, "filler 'nothing'"),
        ({"filler": "eos"}, "evict puts no filler in"),
        ({"filler": "pad", "intervention": "substitute"}, "no pad token"),
        ({"cells": "9"}, "layer 9"),
        ({"cells": "0", "intervention": "substitute"}, "no sense"),
        ({"lag": 2, "intervention": "substitute"}, "no sense"),
        ({"lag": 2, "preset": "epikv"}, "no sense"),
        ({"lag": 2, "intervention": "knockout"}, "lag 2 with knockout"),
        ({"lag": -1}, "lag -1"),
        ({"random_subsets": -1}, "random_subsets -1"),
        ({"random_subsets": 5, "intervention": "knockout"}, "random subsets"),
        ({"random_subsets": 5, "lag": 0}, "random subsets"),
        ({"screen": 0.0}, "screen 0.0"),
        ({"screen": 1.5}, "screen 1.5"),
        ({"screen": float("nan")}, "screen nan"),
        ({"screen": "some"}, "screen 'some'"),
        ({"screen": 0.2, "intervention": "knockout"}, "evict alone"),
        ({"screen": "auto", "lag": 1}, "evict alone"),
        ({"screen": "auto", "preset": "epikv"}, "evict alone"),
    ],
)
def test_contradictions_are_refused_with_a_way_out(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        made(**asked)
    assert message in caught.value.message
    assert caught.value.hint


def test_a_filler_the_model_has_no_embedding_for_is_refused() -> None:
    def padded(token: int) -> Model:
        return dataclasses.replace(MODEL, tokenizer=SimpleNamespace(pad_token_id=token))

    made(padded(MODEL.d_vocab - 1), intervention="substitute", filler="pad")
    with pytest.raises(InputError, match=f"filler 'pad' is token {MODEL.d_vocab}"):
        made(padded(MODEL.d_vocab), intervention="substitute", filler="pad")


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"intervention": "knockout"}, InputError),
        ({"lag": 0}, InputError),
        ({"cells": "0"}, InputError),
        ({"flips": True}, ModelRefused),
        ({"screen": 0.5}, ModelRefused),
    ],
)
def test_what_needs_a_mask_is_refused_on_a_backend_without(asked: dict[str, Any], error: type[KvlensError]) -> None:
    unmasked = dataclasses.replace(MODEL, attention="flash_attention_2")
    with pytest.raises(error, match="flash_attention_2"):
        made(unmasked, **asked)
    made(MODEL, **asked)
    made(unmasked)
    made(unmasked, intervention="substitute")
