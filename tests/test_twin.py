"""Twins: they leave the model as it was, run any part of it, and refuse what they cannot run a part of by name."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import pytest
import tiny
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from kvlens.errors import InputError, ModelRefused
from kvlens.model import Model, Twin, hidden, logits, watch_blocks, wrap

N = 12
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(params=tiny.ATTENTION_FAMILIES)
def family(request: pytest.FixtureRequest) -> Model:
    return wrap(tiny.ATTENTION_FAMILIES[request.param]())


def call(n: int = N, seed: int = 0, batch: int = 1) -> dict[str, Tensor]:
    return {"ids": tiny.token_ids(n, seed=seed, batch=batch), "positions": torch.arange(n).expand(batch, n)}


def own(_: int, query: Tensor, key: Tensor, value: Tensor, keywords: Mapping[str, Any]) -> Tensor:
    """What the model's own attention does, written out."""
    repeat = query.shape[1] // key.shape[1]
    scores = query.double() @ key.double().repeat_interleave(repeat, 1).mT * keywords["scaling"]
    if keywords.get("softcap") is not None:
        scores = torch.tanh(scores / keywords["softcap"]) * keywords["softcap"]
    n = query.shape[2]
    apart = torch.arange(n)[:, None] - torch.arange(n)
    seen = (apart >= 0) & (apart < (keywords.get("sliding_window") or n))
    scores = scores.masked_fill(~seen, -torch.inf)
    if keywords.get("s_aux") is not None:
        sinks = keywords["s_aux"].double()[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., :n] @ value.double().repeat_interleave(repeat, 1)).to(query.dtype)


def nothing(_: int, query: Tensor, *__: Any) -> Tensor:
    return torch.zeros_like(query)


def outputs(model: Model, ids: Tensor) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    with watch_blocks(model, lambda layer, states: found.update({layer: states.clone()})):
        hidden(model, ids)
    return [found[layer] for layer in range(model.n_layers)]


def facts(model: Model) -> dict[str, Any]:
    """All that a twin could have changed: the wiring by identity, hooks, attributes, configs, the table of backends."""
    modules = dict(model.hf.named_modules())
    configs = {name: module.config for name, module in modules.items() if hasattr(module, "config")}
    return {
        "wiring": {name: {key: id(child) for key, child in m._modules.items()} for name, m in modules.items()},
        "weights": {name: (id(weight), weight._version) for name, weight in model.hf.named_parameters()},
        "hooks": {(name, kind): list(getattr(m, kind).items()) for name, m in modules.items() for kind in HOOKS},
        "attributes": {name: {key: id(value) for key, value in vars(m).items()} for name, m in modules.items()},
        "configs": {name: (id(config), config._attn_implementation) for name, config in configs.items()},
        "values": {name: config.to_dict() for name, config in configs.items()},
        "backends": dict(ALL_ATTENTION_FUNCTIONS.items()),
        "training": {name: m.training for name, m in modules.items()},
    }


def twins(model: Model) -> list[Twin]:
    """From every block on, with the last MLP and without."""
    skips = (False, True) if not isinstance(model.hf, type(tiny.gpt_oss())) else (False,)
    return [Twin(model, start, skip_mlp=skip) for start in range(model.n_layers) for skip in skips]


# Parts of a model


def test_a_twin_of_any_part_ends_where_the_model_does(family: Model) -> None:
    """On more tokens than it was tried on, at positions that do not begin at 0, given the states of that text."""
    ids, positions = tiny.token_ids(N, batch=2, seed=5), torch.arange(7, 7 + N).expand(2, N)
    found: dict[int, Tensor] = {}
    with watch_blocks(family, lambda layer, states: found.update({layer: states.clone()})):
        truth = hidden(family, ids, positions=positions)
    for start in range(family.n_layers):
        states = found[start - 1] if start else None
        ours = Twin(family, start).run(own, ids=ids, positions=positions, states=states)
        torch.testing.assert_close(ours, truth, atol=1e-4, rtol=0)


def test_attention_is_told_its_layer_and_what_the_layer_would_attend_to(family: Model) -> None:
    told: list[tuple[int, torch.Size, torch.Size, Any]] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, keywords: Mapping[str, Any]) -> Tensor:
        told.append((layer, query.shape, key.shape, keywords.get("sliding_window")))
        assert value.shape == key.shape
        return own(layer, query, key, value, keywords)

    for start in range(family.n_layers):
        states = torch.randn(1, N, family.d_model) if start else None
        told.clear()
        Twin(family, start).run(attend, states=states, **call())
        assert [layer for layer, *_ in told] == [*range(start, family.n_layers)]
        for layer, query, key, window in told:
            assert query == (1, family.n_heads, N, family.d_head)
            assert key == (1, family.n_kv_heads, N, family.d_head)
            assert window in (family.sliding[layer], None)


def test_without_its_mlp_the_last_block_adds_attention_alone() -> None:
    model, ids = wrap(tiny.llama()), tiny.token_ids(N)
    entered = outputs(model, ids)[1]
    ours = Twin(model, 2, skip_mlp=True).run(nothing, states=entered, **call())
    torch.testing.assert_close(ours, model.decoder.norm(entered), atol=1e-6, rtol=0)
    whole = Twin(model, 2).run(nothing, states=entered, **call())
    block = model.decoder.layers[2]
    with_mlp = model.decoder.norm(entered + block.mlp(block.post_attention_layernorm(entered)))
    torch.testing.assert_close(whole, with_mlp, atol=1e-5, rtol=0)
    assert (whole - ours).abs().max() > 0.1


def test_states_lead_and_ids_do_not_where_a_pass_starts_late(family: Model) -> None:
    twin, states = Twin(family, 1), torch.randn(1, N, family.d_model, generator=torch.Generator().manual_seed(0))
    one = twin.run(own, states=states, **call(seed=1))
    assert torch.equal(one, twin.run(own, states=states, **call(seed=2)))
    assert not torch.equal(one, twin.run(own, states=states.flip(1), **call(seed=1)))


def test_embeddings_stand_in_for_those_of_ids(family: Model) -> None:
    twin, args = Twin(family), call(seed=3)
    embeddings = family.decoder.get_input_embeddings()(args["ids"])
    one = twin.run(own, **args)
    other = args | {"ids": torch.zeros_like(args["ids"])}
    torch.testing.assert_close(twin.run(own, embeddings=embeddings, **other), one, atol=1e-5, rtol=0)
    assert (twin.run(own, **other) - one).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_have_twins(family: Model, dtype: torch.dtype) -> None:
    family.hf.to(dtype)
    assert len(twins(family)) >= family.n_layers


def test_states_far_larger_than_the_final_ones_are_no_reason_to_refuse() -> None:
    """Massive activations: a bias added to them is rounded at their size, not at that of the normed states."""
    for dtype in (torch.float32, torch.bfloat16):
        hf_model = tiny.gpt2()
        hf_model.transformer.wte.weight.mul_(1e4)
        assert Twin(wrap(hf_model.to(dtype)), 2, skip_mlp=True).start == 2


# The model is left as it was


def test_making_and_running_twins_leaves_the_model_untouched(family: Model) -> None:
    args = call(batch=2)
    before_logits, before = logits(family, args["ids"]), facts(family)
    for twin in twins(family):
        states = torch.randn(2, N, family.d_model) if twin.start else None
        twin.run(nothing, states=states, **args)
        assert facts(family) == before
    assert torch.equal(logits(family, args["ids"]), before_logits)  # bit for bit


def test_an_exception_in_attention_leaves_model_and_twin_untouched(family: Model) -> None:
    args, twin = call(), Twin(family, 1)
    states = torch.randn(1, N, family.d_model)
    before_logits, before, truth = logits(family, args["ids"]), facts(family), twin.run(own, states=states, **args)

    def fail(layer: int, *_: Any) -> Tensor:
        assert layer < family.n_layers - 1  # not in the first layer, but half-way
        return own(layer, *_)

    with pytest.raises(AssertionError):
        twin.run(fail, states=states * 2, **args)
    assert facts(family) == before
    assert torch.equal(logits(family, args["ids"]), before_logits)
    assert torch.equal(twin.run(own, states=states, **args), truth)
    with pytest.raises(InputError):
        twin.run(own, **args)  # the states of the run before are not still there


def test_states_are_not_held_after_a_run() -> None:
    """They are the largest thing a pass is given, and a twin is kept."""
    twin = Twin(wrap(tiny.llama()), 2)
    for attend in (nothing, lambda *_: 1 / 0):
        states = torch.zeros(1, N, 32)
        alive = weakref.ref(states)
        with suppress(ZeroDivisionError):
            twin.run(attend, states=states, **call())
        del states
        gc.collect()
        assert alive() is None


def test_a_refused_model_is_left_untouched_too() -> None:
    model = wrap(tiny.llama())
    _become(model, Scaled)
    before, ids = facts(model), tiny.token_ids(N)
    truth = logits(model, ids)
    with pytest.raises(ModelRefused):
        Twin(model, 2, skip_mlp=True)
    assert facts(model) == before
    assert torch.equal(logits(model, ids), truth)


def test_twins_of_one_model_do_not_disturb_each_other() -> None:
    """Also where one runs inside the attention of the other."""
    model, args = wrap(tiny.gemma3()), call()
    states = torch.randn(1, N, model.d_model)
    full, fast = Twin(model), Twin(model, 3, skip_mlp=True)
    one, two = full.run(own, **args), fast.run(nothing, states=states, **args)
    truth = logits(model, args["ids"])
    within: list[Tensor] = []

    def attend(layer: int, *what: Any) -> Tensor:
        within.append(fast.run(nothing, states=states, **args))
        within.append(logits(model, args["ids"]))
        return own(layer, *what)

    assert torch.equal(full.run(attend, **args), one)
    assert len(within) == 2 * model.n_layers
    assert all(torch.equal(found, two) for found in within[::2])
    assert all(torch.equal(found, truth) for found in within[1::2])


def test_a_twin_shares_every_weight_and_follows_the_model() -> None:
    model, args = wrap(tiny.llama()), call()
    twin = Twin(model)
    before = twin.run(own, **args)
    model.decoder.layers[1].mlp.down_proj.weight.mul_(2)
    after = twin.run(own, **args)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, hidden(model, args["ids"]), atol=1e-4, rtol=0)


def test_hooks_of_a_user_do_not_see_a_twins_blocks() -> None:
    model, seen = wrap(tiny.llama()), []
    handles = [model.decoder.layers[2].register_forward_hook(lambda *_: seen.append("block"))]
    handles += [model.layers[2].register_forward_hook(lambda *_: seen.append("attention"))]
    twin = Twin(model, 2)
    seen.clear()
    twin.run(nothing, states=torch.zeros(1, N, model.d_model), **call())
    assert not seen
    hidden(model, call()["ids"])
    assert seen == ["attention", "block"]
    for handle in handles:
        handle.remove()


# What is refused


@pytest.mark.parametrize("start", [-1, 3, 1000])
def test_a_block_that_is_none_is_refused(start: int) -> None:
    with pytest.raises(InputError, match=f"block {start}") as caught:
        Twin(wrap(tiny.llama()), start)
    assert "blocks 0 to 2" in str(caught.value.hint)


def test_states_are_for_passes_that_start_late_alone() -> None:
    model = wrap(tiny.llama())
    with pytest.raises(InputError, match="block 0 needs no states"):
        Twin(model).run(nothing, states=torch.zeros(1, N, model.d_model), **call())
    with pytest.raises(InputError, match="block 2 needs states"):
        Twin(model, 2).run(nothing, **call())


class Scaled(LlamaDecoderLayer):
    """Multiplies its residual."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * 1.5


class Unnamed(LlamaDecoderLayer):
    """Calls its MLP by another name."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.feed_forward(self.post_attention_layernorm(hidden_states))


class Second(LlamaDecoderLayer):
    """Has another way beside its 'mlp' to change a state by what the state is."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return out + 0.3 * torch.tanh(out)


class Tells(LlamaDecoderLayer):
    """Tells the blocks after it something beside the stream."""

    said: ClassVar[list[Tensor]] = []

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        Tells.said.append(hidden_states)
        return super().forward(hidden_states, **kwargs)


class Hears(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        heard = Tells.said.pop() if Tells.said else 0.0
        return super().forward(hidden_states + heard, **kwargs)


def _become(model: Model, kind: type[nn.Module], block: int = 2) -> None:
    model.decoder.layers[block].__class__ = kind


@pytest.mark.parametrize("kind", [Scaled, Second])
def test_a_block_that_changes_states_by_itself_is_refused_where_that_matters(kind: type[nn.Module]) -> None:
    model, args = wrap(tiny.llama()), call()
    _become(model, kind)
    for start in (0, 2):
        with pytest.raises(ModelRefused, match=f"{kind.__name__}.*still changes the states") as caught:
            Twin(model, start, skip_mlp=True)
        assert "'mlp'" in str(caught.value.hint)
    found = Twin(model, 2).run(own, states=outputs(model, args["ids"])[1], **args)  # with its MLP it is a block
    torch.testing.assert_close(found, hidden(model, args["ids"]), atol=1e-4, rtol=0)


def test_a_block_without_an_mlp_of_that_name_is_refused_where_it_is_skipped() -> None:
    model, args = wrap(tiny.llama()), call()
    block = model.decoder.layers[2]
    block.feed_forward = block.mlp
    del block.mlp
    _become(model, Unnamed)
    with pytest.raises(ModelRefused, match=r"Unnamed.*no module 'mlp'"):
        Twin(model, 2, skip_mlp=True)
    found = Twin(model).run(own, **args)
    torch.testing.assert_close(found, hidden(model, args["ids"]), atol=1e-4, rtol=0)


def test_an_mlp_that_is_never_called_or_gives_more_than_states_cannot_be_skipped() -> None:
    model = wrap(tiny.llama())
    block = model.decoder.layers[2]
    block.feed_forward, block.mlp = block.mlp, nn.Linear(32, 32)
    _become(model, Unnamed)
    with pytest.raises(ModelRefused, match="no module 'mlp'"):
        Twin(model, 2, skip_mlp=True)
    with pytest.raises(ModelRefused, match=r"GptOssDecoderLayer.*no module 'mlp' that puts out states alone"):
        Twin(wrap(tiny.gpt_oss()), 2, skip_mlp=True)


def test_a_module_of_two_names_is_one_module() -> None:
    model, args = wrap(tiny.llama()), call()
    block = model.decoder.layers[2]
    block.feed_forward = block.mlp
    block.self_attention = block.self_attn
    _become(model, Unnamed)
    states = outputs(model, args["ids"])[1]
    found = Twin(model, 2, skip_mlp=True).run(nothing, states=states, **args)
    torch.testing.assert_close(found, model.decoder.norm(states), atol=1e-6, rtol=0)


def test_a_block_that_needs_more_than_the_stream_is_refused() -> None:
    model = wrap(tiny.llama())
    _become(model, Tells, 0)
    _become(model, Hears, 2)
    Tells.said.clear()
    assert Twin(model).start == 0
    Tells.said.clear()
    with pytest.raises(ModelRefused, match="from block 1 on it does not end where the whole model does"):
        Twin(model, 1)


def test_a_forward_that_was_replaced_is_refused_where_a_copy_would_run_it() -> None:
    """As loaders over several devices do; a copy of such a module would run the original's parts."""
    model, args = wrap(tiny.llama()), call()
    block = model.decoder.layers[1]
    block.forward = partial(block.forward)
    for start in (0, 1):
        with pytest.raises(ModelRefused, match="LlamaDecoderLayer has a forward that was replaced"):
            Twin(model, start)
    found = Twin(model, 2).run(own, states=outputs(model, args["ids"])[1], **args)  # this block is not run at all
    torch.testing.assert_close(found, hidden(model, args["ids"]), atol=1e-4, rtol=0)
    mlp = model.decoder.layers[2].mlp
    mlp.forward = partial(mlp.forward)  # shared, not copied
    assert Twin(model, 2, skip_mlp=True).start == 2
    for part in (model.layers[2], model.decoder):
        changed = wrap(tiny.llama())
        module = changed.layers[2] if part is model.layers[2] else changed.decoder
        module.forward = partial(module.forward)
        with pytest.raises(ModelRefused, match=f"{type(module).__name__} has a forward"):
            Twin(changed, 2)
