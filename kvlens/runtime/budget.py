"""How many tokens may stay? Tokens, bytes and fractions become one number, here and nowhere else.

1. `tokens`: as given, for every KV head.
2. `bytes`: of keys and values that one row of the batch may take in all managed layers, over what one token takes
   there, rounded down.
3. `keep_fraction`: of the row's prompt (of what is seen of it, while it comes in chunks), the fraction read as the
   decimal number that was written, rounded down, but never below `sinks` + `recent` (whole pages counted) nor 1.
4. Where `allocate.table` says it for each layer and KV head, it is the table's mean over the managed layers.

This is J, the mean of all heads. An allocator shares it (kvlens.allocate); under `uniform_cap` no head gets more.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.causal_lm import Model
from kvlens.errors import InputError
from kvlens.policy import Policy


def token_bytes(model: Model, layers: tuple[int, ...]) -> int:
    """Bytes that one token of one row takes: keys and values of every KV head of these layers."""
    return 2 * len(layers) * model.n_kv_heads * model.d_head * model.dtype.itemsize


def fixed_tokens(policy: Policy, model: Model, layers: tuple[int, ...]) -> int | None:
    """1. and 2.: the budget in tokens per KV head; None where it depends on the prompt.

    Raises: InputError for bytes that do not hold what is protected, or not one token.
    """
    if policy.budget.tokens is not None:
        return policy.budget.tokens
    if policy.budget.bytes is None:
        return None
    one = token_bytes(model, layers)
    tokens = policy.budget.bytes // one
    least = max(1, policy.kept_anyhow())
    if tokens < least:
        raise InputError(
            f"a budget of {policy.budget.bytes:,} bytes holds {tokens} tokens of {one:,} bytes each: too few",
            f"give at least {least * one:,} bytes",
        )
    return tokens


def check_table(policy: Policy, model: Model) -> None:
    """Raise InputError for a table of budgets that is not this model's."""
    table = policy.allocate.table
    if table is None:
        return
    shape = {len(table), *(len(row) for row in table)}
    if len(table) != model.n_layers or any(len(row) != model.n_kv_heads for row in table):
        raise InputError(
            f"allocate.table of sizes {sorted(shape)}: {model.name} has {model.n_layers} layers of "
            f"{model.n_kv_heads} KV heads",
            "give one row a layer and one number a KV head",
        )


def fraction_tokens(fraction: float, n_prompt: int, least: int = 1) -> int:
    """3. for one row."""
    return max(1, least, math.floor(Fraction(repr(fraction)) * n_prompt))


def nominal(
    policy: Policy, tokens: int | None, n_prompt: Int[Tensor, " batch"], layers: tuple[int, ...]
) -> Int[Tensor, " batch"]:
    """J of every row; `tokens` are those of `fixed_tokens`."""
    if policy.allocate.table is not None:
        tokens = math.floor(_mean_of_table(policy.allocate.table, layers))
    if tokens is not None:
        return torch.full_like(n_prompt, tokens)
    fraction, least = policy.budget.keep_fraction or 1.0, policy.kept_anyhow()
    found = [fraction_tokens(fraction, n, least) for n in n_prompt.tolist()]
    return torch.tensor(found, device=n_prompt.device)


def check_prompt(
    policy: Policy, tokens: int | None, n_prompt: Int[Tensor, " batch"], layers: tuple[int, ...], n_new: int = 0
) -> None:
    """Nothing; raises InputError where a prompt that may not leave will not fit, with `n_new` tokens to come."""
    if not policy.protect.prompt:
        return
    mean, recent = nominal(policy, tokens, n_prompt, layers), policy.protection().recent
    if bool(((n_prompt + n_new > mean) & (n_prompt + min(recent, n_new) > mean)).any()):
        beside = f" and {min(recent, n_new):,} recent tokens are" if n_new else " is"
        raise InputError(
            f"the prompt of {int(n_prompt.max()):,} tokens{beside} protected, more than the budget of "
            f"{int(mean.min()):,} tokens holds",
            "raise the budget, shorten the prompt, or let it leave: protect.prompt false",
        )


def claimed(
    policy: Policy, tokens: int | None, n_prompt: Int[Tensor, " batch"], layers: tuple[int, ...]
) -> Float[Tensor, " batch"]:
    """Tokens per KV head, in the mean, that the policy says it keeps of each row."""
    if policy.allocate.table is not None and policy.storage != "uniform_cap":
        return torch.full_like(n_prompt, float(_mean_of_table(policy.allocate.table, layers)), dtype=torch.float64)
    return nominal(policy, tokens, n_prompt, layers).double()


def _mean_of_table(table: tuple[tuple[int, ...], ...], layers: tuple[int, ...]) -> Fraction:
    rows = [table[layer] for layer in layers]
    return Fraction(sum(map(sum, rows)), sum(map(len, rows)))
