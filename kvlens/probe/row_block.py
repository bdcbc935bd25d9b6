"""What is known of the rows of one layer of one trace, and are they the model's own?

1. `RowBlock`: the rows as values. A learned sink logit is a key that is always kept, with value 0: its share is `sink`,
   and with it a row sums to 1.
2. Every row is checked against what the layer put out. The allowed error follows FlashAttention's tests: twice that of
   attention written out in plain torch at the model's dtype, the largest over the layer's rows, against float64; and
   one rounding of the layer's largest value in that dtype on top, which is what is left where plain torch makes none,
   and sixteen in float32, in which kernels sum blocks of keys: few rows may all be lucky in plain torch.
   Attention that means something else is off by orders of magnitude more.
3. `RowCheck` counts, over as many blocks as there are; `require_match` refuses what does not match.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from kvlens.errors import ModelRefused
from kvlens.model import Model

SLACK = 2.0  # of plain torch's error
SUMMED = 16  # roundings in float32
TINY = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps


@dataclass(frozen=True, eq=False)
class RowBlock:
    """The rows of one layer of one trace, on the model's device; row i is query `queries[i]` of query head `heads[i]`.

    Rows go by head, then by query. `weights` are 0 for keys the query does not see (later ones, and those a sliding
    window hides) and sum to 1 with `sink`, up to rounding; `values[heads[i] // (n_heads / n_kv_heads)]` are the row's.
    `error` is the largest difference from the model's own output over d_head, `allowed` how large it may be.
    """

    trace_id: str
    layer: int
    heads: Int[Tensor, " row"]
    queries: Int[Tensor, " row"]
    weights: Float32[Tensor, "row key"]
    values: Float32[Tensor, "kv_head key d_head"]
    dense: Float32[Tensor, "row d_head"]
    sink: Float32[Tensor, " row"]
    key_norms: Float32[Tensor, "kv_head key"]
    n_keys: Int[Tensor, " row"]  # visible ones
    kv_heads: Int[Tensor, " row"]
    error: Float32[Tensor, " row"]
    allowed: float

    @property
    def off(self) -> Bool[Tensor, " row"]:
        """Which rows are not the model's own."""
        return self.error > self.allowed


@dataclass(frozen=True, slots=True)
class RowCheck:
    """How many rows were held against the model's own output, how many failed, and the worst of them.

    `worst` is error over allowed error: at most 1 where all is well.
    """

    n_rows: int = 0
    n_off: int = 0
    worst: float = 0.0
    worst_layer: int = -1

    @classmethod
    def of(cls, block: RowBlock) -> RowCheck:
        """The check of one layer's rows."""
        worst = float(block.error.max()) / block.allowed
        return cls(block.error.shape[0], int(block.off.sum()), worst, block.layer)

    def __add__(self, other: RowCheck) -> RowCheck:
        worse = max(self, other, key=lambda check: check.worst)
        return RowCheck(self.n_rows + other.n_rows, self.n_off + other.n_off, worse.worst, worse.worst_layer)


def require_match(check: RowCheck, model: Model) -> None:
    """Nothing; raises ModelRefused where a captured row is not what the model itself put out."""
    if check.n_off:
        raise ModelRefused(
            f"{model.name}: {check.n_off} of {check.n_rows} captured rows are not what the model's own attention "
            f"({model.attention}) puts out, the worst in layer {check.worst_layer}, {check.worst:.3g} times the "
            "allowed error: it attends in a way that kvlens does not recompute",
            "use --attention eager: other backends leave out what they do not know, such as soft-capping",
        )


def make_block(
    trace_id: str,
    layer: int,
    queries: Int[Tensor, "kv_head query"],
    weights: Float[Tensor, "head query key"],
    values: Float[Tensor, "kv_head key d_head"],
    dense: Float[Tensor, "head query d_head"],
    *,
    sink: Float[Tensor, "head query"],
    keys: Float[Tensor, "kv_head key d_head"],
    own: Float[Tensor, "head query d_head"],
    plain: Float[Tensor, "head query d_head"],
    window: int | None,
) -> RowBlock:
    """The block of these rows; `own` is what the model put out, `plain` what its dtype is good for.

    Raises: ModelRefused where one of them is not finite.
    """
    n_heads, n_rows = weights.shape[:2]
    if not bool(torch.isfinite(own).all() & torch.isfinite(dense).all()):
        raise ModelRefused(
            f"the output of attention in layer {layer} holds NaN or infinity on trace {trace_id!r}",
            "check the model's weights, or use --dtype float32",
        )
    heads = torch.arange(n_heads, device=weights.device).repeat_interleave(n_rows)
    group = n_heads // values.shape[0]
    positions = queries.repeat_interleave(group, 0).flatten()
    rounding = torch.finfo(own.dtype).eps + SUMMED * torch.finfo(torch.float32).eps
    allowed = SLACK * float((plain.double() - dense).abs().max()) + rounding * max(float(values.abs().max()), TINY)
    return RowBlock(
        trace_id,
        layer,
        heads,
        positions,
        weights.flatten(0, 1).float(),
        values.to(torch.float32, copy=True, memory_format=torch.contiguous_format),
        dense.flatten(0, 1).float(),
        sink.flatten().float(),
        torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32),
        positions.add(1).clamp_max(window or weights.shape[-1]),
        heads // group,
        (own.double() - dense).abs().amax(-1).flatten().float(),
        allowed,
    )
