"""A second device for a machine that has one: tensors that hold numbers but say they are on `meta`.

Within `Split` every operation on tensors of both devices fails, as it does between two GPUs; `.to` and `copy_` move,
numbers of no dimension may be on the CPU, and what is made on `meta` gets numbers as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FAR = torch.device("meta")
MOVES = ("aten::_to_copy", "aten::copy_")


class TwoDevices(RuntimeError):
    """An operation on tensors of both devices."""


class Far(torch.Tensor):
    """A tensor on the second device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Far:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=FAR
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


class Split(TorchDispatchMode):
    """Where there are two devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the numbers, its answer where it belongs."""
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    far = any(isinstance(value, Far) for value in given)
    near = any(not isinstance(value, Far) and value.ndim for value in given)
    if far and near and func._schema.name not in MOVES:
        raise TwoDevices(f"{func} over both devices")
    asked = kwargs.get("device")
    if asked is not None:
        far = torch.device(asked).type == FAR.type
        kwargs = kwargs | {"device": torch.device("cpu")}
    args, kwargs = tree_map(lambda value: value.held if isinstance(value, Far) else value, (args, kwargs))
    found = func(*args, **kwargs)
    if func._schema.is_mutable:  # in place
        return given[0]
    return tree_map(lambda value: Far(value) if far and isinstance(value, torch.Tensor) else value, found)


def near(value: torch.Tensor) -> torch.Tensor:
    """The numbers, here."""
    return value.held if isinstance(value, Far) else value
