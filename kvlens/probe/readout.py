"""What did the answer lose? Log-probabilities and KL divergence from hidden states, a block of logits at a time.

1. the full cache's distribution at the m target rows is kept once ([target, d_vocab]);
2. for each block of counterfactual rows the logits exist only while their log-sum-exp, the target's logit and
   the expectation under the full distribution are read off; sums over target tokens are fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import model as models
from kvlens.errors import InputError, ModelRefused
from kvlens.linear import fast_linear
from kvlens.model import Model

BLOCK_ROWS = 128  # rows of logits that exist at once: 25 MB for a vocabulary of 49,152

Metric = Callable[[Float[Tensor, "row target d_vocab"], Int[Tensor, " target"]], Float[Tensor, " row"]]


@dataclass(frozen=True)
class Effects:
    """What counterfactual rows gave; `metric` only when a user's metric was passed."""

    log_probs: Float[Tensor, "row target"]  # fp64 on cpu: log p of each target token, nats
    kl_nats: Float[Tensor, " row"]  # fp64 on cpu: summed over target positions
    metric: Float[Tensor, " row"] | None = None


@dataclass(frozen=True)
class Reference:
    """The full cache's answer to the same target rows."""

    log_probs: Float[Tensor, " target"]  # fp64 on cpu, nats
    probabilities: Float[Tensor, "target d_vocab"]  # fp32
    negentropy: Float[Tensor, " target"]  # sum of p log p, fp64
    metric: float | None = None


def make_reference(
    model: Model,
    states: Float[Tensor, "1 target d_model"],
    targets: Int[Tensor, " target"],
    metric: Metric | None = None,
) -> Reference:
    """The reference from the full cache's hidden states at the rows that predict `targets`."""
    with fast_linear():
        logits = models.unembed(model, states)[0]
    value = None if metric is None else float(_measured(metric, logits[None], targets)[0])
    # fp64: probabilities whose sum is off by 1e-6 would shift every KL by that times the mean logit.
    log_p = logits.double().log_softmax(-1)
    probabilities = log_p.exp()
    negentropy = (probabilities * log_p).sum(-1)
    chosen, _ = _target_log_probs(logits[None], targets)  # the rows' own arithmetic: hiding nothing gives exactly 0
    return Reference(chosen[0].cpu(), probabilities.float(), negentropy, value)


def _measured(metric: Metric, logits: Tensor, targets: Tensor) -> Tensor:
    """What a user's metric makes of copies of the logits and targets, fp64 on cpu: it may change them as it likes.

    Raises: InputError unless it gives one finite real number a row.
    """
    found = metric(logits.clone(), targets.clone())
    if not isinstance(found, Tensor) or found.shape != logits.shape[:1] or found.is_complex():
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(
            f"the metric gave {got} for {logits.shape[0]} rows",
            "it takes (logits [row, target, d_vocab], target ids [target]) and gives a real tensor [row]",
        )
    if not bool(torch.isfinite(found.double()).all()):
        raise InputError("the metric gave NaN or infinity", "give a finite number a row")
    return found.double().cpu()


def _target_log_probs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 log p of the targets and log-normaliser, both [row, target]; leaves logits minus their row maximum."""
    top = logits.amax(-1, keepdim=True)
    norm = logits.sub_(top).exp().sum(-1, dtype=torch.float64).log()
    if not bool(torch.isfinite(norm).all()):
        raise ModelRefused("the model's logits hold NaN or infinity", "check its weights, or use --dtype float32")
    index = targets.expand(logits.shape[:2])[..., None]
    return logits.gather(-1, index)[..., 0].double() - norm, norm


def read(
    model: Model,
    states: Float[Tensor, "row target d_model"],
    targets: Int[Tensor, " target"],
    reference: Reference,
    metric: Metric | None = None,
) -> Effects:
    """Effects of a batch of rows. Cost: one unembedding a row; memory `BLOCK_ROWS` rows of logits, twice."""
    step = max(1, BLOCK_ROWS // states.shape[1])
    log_probs, kls, values = [], [], []
    for block in states.split(step):
        with fast_linear():
            logits = models.unembed(model, block)
        if metric is not None:
            values.append(_measured(metric, logits, targets))
        chosen, norm = _target_log_probs(logits, targets)
        log_probs.append(chosen.cpu())
        # KL(p_full || p_row) = sum p log p - sum p (logit - norm); the product overwrites logits no one reads again.
        expected = logits.mul_(reference.probabilities).sum(-1, dtype=torch.float64)
        kls.append((reference.negentropy - expected + norm).sum(-1).cpu())
    return Effects(torch.cat(log_probs), torch.cat(kls), torch.cat(values) if values else None)
