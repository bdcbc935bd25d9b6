"""How is a part of a model run over states and caches of our own, without touching the model?

A twin is a second wiring of the decoder over the same weights: every module that must behave otherwise is a shallow
copy, everything else is shared, so that nothing on the model changes and nothing has to be restored.

1. Its attention modules call a function of ours in place of their backend. It is given what a layer asks with, and
   takes keys and values from where it likes.
2. From block `start` on: the blocks before it are replaced by one that puts out given states, whatever went in.
3. Without the last block's MLP: a module in its place puts out zeros.
4. What 2 and 3 rest on is tried on three tokens when the twin is made: with the model's own attention and MLP outputs
   laid in it ends at the model's own states, and with both silent its last block adds the same vector to every row.
   A model built otherwise is refused by name.

Positions and ids go in as in any call, so rotary angles, embeddings and norms are the model's own.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvlens.attention import around_attention
from kvlens.backends import backend_called, unused_backend_name
from kvlens.causal_lm import Model
from kvlens.errors import InputError, ModelRefused
from kvlens.forward import blocks, hidden

# (layer, query [batch, head, query, d_head], key [batch, kv_head, query, d_head], value, keywords) -> like query
Attend = Callable[[int, Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor]
MLP = "mlp"  # what every family that kvlens knows calls it
TOLERANCE = 1e-3  # of the largest state; float32 leaves 1e-6 between two ways to the same numbers, bfloat16 none
ROUNDINGS = 4  # what two blocks that add the same may differ by in half precision: two sums of two roundings each
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class Given(nn.Module):
    """A block that puts out the states laid in it, whatever goes in."""

    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        self.states: Tensor | None = None

    def forward(self, states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        """What was laid in; what goes in where nothing was."""
        out = states if self.states is None else self.states
        return (out,) if self.as_tuple else out


class Silent(nn.Module):
    """An MLP that puts out what was laid in it, else zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.output: Tensor | None = None

    def forward(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Zeros of the same shape, or what was laid in."""
        return torch.zeros_like(states) if self.output is None else self.output


class Twin:
    """The decoder of `model` from block `start` on, its attention given from outside; `skip_mlp`: of the last block.

    Raises: InputError for a block that is none, ModelRefused for a model built otherwise than the module text says.
    Cost: three passes of three tokens; no weight is copied.
    """

    def __init__(self, model: Model, start: int = 0, *, skip_mlp: bool = False) -> None:
        if not 0 <= start < model.n_layers:
            raise InputError(
                f"a pass cannot start at block {start}", f"{model.name} has blocks 0 to {model.n_layers - 1}"
            )
        self.start = start
        self._model = model
        self._backend = unused_backend_name()
        self._layers: dict[int, int] = {}  # by id of the twin's attention modules
        self._silent = Silent() if skip_mlp else None
        with torch.no_grad():
            seen = _Recorded(model)
            self._given = [Given(seen.as_tuple[layer]) for layer in range(start)]
            self._decoder, self._last = self._rewired(seen)
            self._try(seen)

    def run(
        self,
        attend: Attend,
        *,
        ids: Int[Tensor, "batch pos"],
        positions: Int[Tensor, "batch pos"],
        states: Float[Tensor, "batch pos d_model"] | None = None,
        embeddings: Float[Tensor, "batch pos d_model"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The states after the final norm.

        `states` enter block `start`, where that is not the first; `embeddings` stand in for those of `ids`.
        """

        def call(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: Any = None, **keywords: Any) -> Any:
            output = attend(self._layers[id(module)], query, key, value, keywords)
            return output.transpose(1, 2).contiguous(), None

        if (states is None) != (self.start == 0):
            raise InputError(f"a pass from block {self.start} {'needs no' if self.start == 0 else 'needs'} states")
        what = {"input_ids": ids} if embeddings is None else {"inputs_embeds": embeddings}
        try:
            for block in self._given[-1:]:
                block.states = states
            with backend_called(self._backend, call):
                output = self._decoder(**what, position_ids=positions, use_cache=False)
        finally:
            for block in self._given[-1:]:
                block.states = None
        found: Tensor = output.last_hidden_state
        return found

    def _rewired(self, seen: _Recorded) -> tuple[Any, nn.Module]:
        """The decoder with its own wiring (1 to 3), and its last block."""
        model, stack = self._model, blocks(self._model)
        changed: dict[int, nn.Module] = {id(stack[layer]): block for layer, block in enumerate(self._given)}
        configs: dict[int, Any] = {}
        for layer, module in enumerate(model.layers[self.start :], self.start):
            attention = self._refused_unless_plain(module)
            attention.config = self._config(attention.config, configs)
            self._layers[id(attention)] = layer
            changed[id(module)] = attention
        if self._silent is not None:
            if seen.mlp is None:
                why = f"it has no module '{MLP}' that puts out states alone, which could be skipped"
                raise self._refusal(why, "variants that skip none can be run: full, layers=K")
            changed[id(getattr(stack[-1], MLP))] = self._silent
        changed[id(stack[-1])] = last = self._copy_with(stack[-1], changed)
        decoder: Any = self._copy_with(model.decoder, changed)
        decoder.config = self._config(decoder.config, configs)
        return decoder, last

    def _copy_with(self, module: nn.Module, changed: Mapping[int, nn.Module]) -> nn.Module:
        """The module with these in the place of others below it; itself where there are none."""
        if id(module) in changed:
            return changed[id(module)]
        # not named_children, which leaves out the second name of a module
        own_children = {name: child for name, child in module._modules.items() if child is not None}
        children = {name: self._copy_with(child, changed) for name, child in own_children.items()}
        if all(child is getattr(module, name) for name, child in children.items()):
            return module
        own = self._refused_unless_plain(module)
        own._modules.update(children)
        return own

    def _refused_unless_plain(self, module: nn.Module) -> Any:
        """A shallow copy: its own children and hooks, the same weights."""
        if "forward" in vars(module):  # as multi-device loaders do: the copy would run the original
            raise self._refusal(f"its {type(module).__name__} has a forward that was replaced after it was built")
        own = copy.copy(module)
        own._modules = dict(module._modules)
        for name in HOOKS:
            setattr(own, name, OrderedDict())
        return own

    def _config(self, config: Any, made: dict[int, Any]) -> Any:
        """A copy of a config that names the twin's backend."""
        if id(config) not in made:
            own = copy.deepcopy(config)
            own._attn_implementation = self._backend
            own.output_hidden_states = False
            made[id(config)] = own
        return made[id(config)]

    def _try(self, seen: _Recorded) -> None:
        """Nothing; raises ModelRefused where the twin is no part of the model (4)."""
        if not bool(torch.isfinite(seen.final).all()):
            raise ModelRefused(
                "the model's hidden states hold NaN or infinity", "check its weights, or use --dtype float32"
            )
        call = {"ids": seen.ids, "positions": torch.arange(seen.ids.shape[1], device=seen.ids.device)[None]}
        states = seen.states[self.start - 1] if self.start else None
        if self._silent is not None:
            self._silent.output = seen.mlp
        found = self.run(lambda layer, *_: seen.attention[layer].transpose(1, 2), states=states, **call)
        if not _close(found, seen.final):
            raise self._refusal(f"run from block {self.start} on it does not end where the whole model does")
        if self._silent is None:
            return
        self._silent.output = None
        passed: list[tuple[Tensor, Tensor]] = []
        hook = self._last.register_forward_hook(lambda _, args, out: passed.append((args[0], _tensor(out))))
        self.run(lambda _, query, *__: torch.zeros_like(query), states=states, **call)
        hook.remove()
        went_in, came_out = passed[0]
        added = came_out.float() - went_in.float()
        if not _close(added[:, 1:], added[:, :1].expand_as(added[:, 1:]), came_out):
            raise self._refusal(f"without attention and '{MLP}' its last block still changes the states")

    def _refusal(self, why: str, hint: str = "") -> ModelRefused:
        kind = type(blocks(self._model)[-1]).__name__
        return ModelRefused(
            f"{self._model.name}: {kind} is no block that kvlens can run a part of: {why}",
            hint or "kvlens runs parts of models whose blocks, without hooks, add attention and an 'mlp' to one stream",
        )


class _Recorded:
    """What the model makes of three tokens: block outputs, attention outputs, the last MLP's, the final states."""

    def __init__(self, model: Model) -> None:
        self.ids = torch.arange(3, device=model.device)[None] % model.d_vocab
        self.as_tuple: list[bool] = []
        self.states: list[Tensor] = []
        self.attention: dict[int, Tensor] = {}
        self.mlp: Tensor | None = None
        with ExitStack() as stack:
            for block in blocks(model):
                stack.callback(block.register_forward_hook(self._see).remove)
            mlp = getattr(blocks(model)[-1], MLP, None)
            if isinstance(mlp, nn.Module):
                stack.callback(mlp.register_forward_hook(self._see_mlp).remove)
            stack.enter_context(around_attention(model, self._attend))
            self.final = hidden(model, self.ids)

    def _see(self, _: nn.Module, __: Any, output: Any) -> None:
        self.as_tuple.append(isinstance(output, tuple))
        self.states.append(_tensor(output))

    def _see_mlp(self, _: nn.Module, __: Any, output: Any) -> None:
        self.mlp = output if isinstance(output, Tensor) else None

    def _attend(self, layer: int, own: Callable[[], Tensor], *_: Any) -> Tensor:
        self.attention[layer] = own()
        return self.attention[layer]


def _tensor(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _close(found: Tensor, truth: Tensor, scale: Tensor | None = None) -> bool:
    """Whether they are equal up to rounding: to that of `scale`, where they are differences of such numbers."""
    tolerance = TOLERANCE if scale is None else max(TOLERANCE, ROUNDINGS * torch.finfo(scale.dtype).eps)
    largest = float((truth if scale is None else scale).abs().max())
    return bool((found - truth).abs().max() <= tolerance * largest)
