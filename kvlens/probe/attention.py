"""How can many counterfactuals share one prefix, exactly, without copying it?

A batch holds B counterfactual continuations of one sequence. All share the keys and values of positions
`[0, first)`, computed once; each has its own (private) keys from `first` on. Softmax attention over a union of
disjoint key sets is the average of the attentions over each set, weighted by the softmax of their
log-sum-exps, so:

1. split the visible keys into parts that need no mask and parts that do: prefix keys every query sees (most of
   them), prefix keys some query must not see, private keys some query must not see, remaining private keys
   (plain causal);
2. attend to each part once for the whole batch: prefix parts with the batch folded into the query axis;
3. merge the parts by their log-sum-exps, a learned sink logit counting as one more part without a value;
4. where rows are long, writing and merging several outputs costs more than copying one layer's prefix for each row:
   there all keys form one part under one mask.

Nothing here approximates: the result equals masked attention over the whole sequence up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.probe.attend import Part, as_bias, attend, merge

KeyValues = tuple[Tensor, Tensor]  # keys and values, each [1, kv_head, pos, d_head]


@dataclass(frozen=True)
class Layout:
    """Which keys form which part, for all layers with the same sliding window and the same occluded heads."""

    common: Int[Tensor, " common"] | slice  # prefix keys every query of every row sees
    mixed: Int[Tensor, " mixed"]  # prefix keys some query must not see
    mixed_bias: Float[Tensor, "g kv bq mixed"]  # g and kv are 1 when all heads agree
    n_masked: int  # private keys [0, n_masked) need a mask; the rest is plain causal
    private_bias: Float[Tensor, "b h q private"]
    joined_bias: Float[Tensor, "b h q all"] | None  # all keys in one piece, where that is cheaper


class SharedPrefixAttention:
    """Attention of B counterfactual rows over one shared prefix, as a transformers attention function.

    Row b may not see the keys `hidden[b]` from queries at positions >= `cut[b]`, in the layers and heads of
    `cells` (None: all). `first` is the position of the batch's first token; keys before it come from `prefix`.
    With `keep=True` private keys are kept per layer (`private`), so that decoding can go on one token at a time,
    or so that a prefill can be captured.
    """

    def __init__(
        self,
        prefix: Sequence[KeyValues],
        first: int,
        hidden: Bool[Tensor, "row pos"],
        cut: Int[Tensor, " row"],
        sliding: Sequence[int | None],
        *,
        cells: Bool[Tensor, "layer head"] | None = None,
        keep: bool = False,
    ) -> None:
        self.prefix, self.first, self.hidden, self.cut = prefix, first, hidden, cut
        self.sliding, self.cells, self.keep = sliding, cells, keep
        self.private: dict[int, KeyValues] = {}
        self._layouts: dict[tuple[int | None, bytes, int], Layout] = {}

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attention output [row, query, head, d_head]; a mask passed in is ignored: this object is the mask."""
        layer = int(module.layer_idx)
        n_past = 0
        if self.keep:
            if layer in self.private:
                past = self.private[layer]
                n_past = past[0].shape[2]
                key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
            self.private[layer] = (key, value)
        scaling = kwargs.get("scaling")
        options = {
            "scale": float(query.shape[-1] ** -0.5 if scaling is None else scaling),
            "softcap": kwargs.get("softcap"),
        }
        layout = self._layout(layer, query, n_past)
        if layout.joined_bias is not None:
            parts = [self._joined(layer, layout.joined_bias, query, key, value, options)]
        else:
            parts = self._prefix_parts(layer, layout, query, options)
            parts += self._private_parts(layout, query, key, value, n_past, options)
        sinks = kwargs.get("s_aux")
        if sinks is not None:
            lse = sinks.float().view(1, -1, 1).expand(query.shape[:3])
            parts.append((torch.zeros_like(query), lse))
        return merge(parts).transpose(1, 2).contiguous(), None

    def keep_rows(self, rows: Int[Tensor, " row"]) -> None:
        """Nothing; the batch goes on with these of its rows alone."""
        self.hidden, self.cut = self.hidden[rows], self.cut[rows]
        self.private = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self.private.items()}
        self._layouts.clear()

    def _joined(
        self, layer: int, bias: Tensor, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Part:
        """All keys at once, one key head at a time so that its group shares them: for long rows, where writing and
        merging several outputs costs more than copying one layer's prefix for each row.
        """
        n_rows, n_heads, n_query, d_head = query.shape
        n_kv = key.shape[1]
        shared = [x.expand(n_rows, -1, -1, -1) for x in self.prefix[layer]]
        keys, values = (torch.cat(pair, 2) for pair in zip(shared, (key, value), strict=True))
        grouped = query.reshape(n_rows, n_kv, n_heads // n_kv, n_query, d_head)
        biases = bias.expand(-1, n_heads, -1, -1).unflatten(1, (n_kv, -1)) if bias.shape[1] > 1 else None
        outs, lses = [], []
        for head in range(n_kv):
            own = [x[:, head : head + 1].expand(-1, n_heads // n_kv, -1, -1) for x in (keys, values)]
            out, lse = attend(grouped[:, head], *own, bias=bias if biases is None else biases[:, head], **options)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs, 1), torch.cat(lses, 1)

    def _prefix_parts(self, layer: int, layout: Layout, query: Tensor, options: dict[str, Any]) -> list[Part]:
        if self.first == 0:
            return []
        keys, values = self.prefix[layer]
        n_rows, n_heads, n_query, d_head = query.shape
        n_kv = keys.shape[1]
        group = n_heads // n_kv
        # [row, kv * group, query] -> [group, kv, row * query]: keys are then shared by rows and by the group.
        folded = query.reshape(n_rows, n_kv, group, n_query, d_head).permute(2, 1, 0, 3, 4)
        folded = folded.reshape(group, n_kv, n_rows * n_query, d_head)
        parts = []
        for index, bias in ((layout.common, None), (layout.mixed, layout.mixed_bias)):
            chosen = keys[:, :, index], values[:, :, index]
            if chosen[0].shape[2] == 0:
                continue
            expanded = [x.expand(group, -1, -1, -1) for x in chosen]
            out, lse = attend(folded, *expanded, bias=bias, **options)
            out = out.reshape(group, n_kv, n_rows, n_query, d_head).permute(2, 1, 0, 3, 4)
            lse = lse.reshape(group, n_kv, n_rows, n_query).permute(2, 1, 0, 3)
            parts.append((out.reshape(query.shape), lse.reshape(query.shape[:3])))
        return parts

    def _private_parts(
        self, layout: Layout, query: Tensor, key: Tensor, value: Tensor, n_past: int, options: dict[str, Any]
    ) -> list[Part]:
        group = query.shape[1] // key.shape[1]
        if group > 1 and query.shape[2] == 1:
            return self._one_query(layout, query, key, value, options)
        if group > 1:
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        parts = []
        split = layout.n_masked
        if split:
            parts.append(attend(query, key[:, :, :split], value[:, :, :split], bias=layout.private_bias, **options))
        if split == key.shape[2]:
            return parts
        # Queries before `split` see none of the remaining keys: those keys come later.
        skipped = max(0, split - n_past)
        if n_past and query.shape[2] != 1:
            raise RuntimeError("private keys can only be extended one token at a time")
        out, lse = attend(
            query[:, :, skipped:], key[:, :, split:], value[:, :, split:], causal=query.shape[2] > 1, **options
        )
        if skipped:
            out = torch.cat([torch.zeros_like(query[:, :, :skipped]), out], 2)
            lse = torch.cat([lse.new_full((*lse.shape[:2], skipped), -torch.inf), lse], 2)
        parts.append((out, lse))
        return parts

    @staticmethod
    def _one_query(layout: Layout, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> list[Part]:
        """The same for a single token: the heads of a group become queries of their key head, no key is copied."""
        shape, split, bias = query.shape, layout.n_masked, layout.private_bias
        query = query.reshape(shape[0], key.shape[1], -1, shape[3])
        heads = bias.expand(-1, shape[1], -1, -1).reshape(*query.shape[:3], split)
        parts = []
        for piece, seen in ((slice(split), heads), (slice(split, None), None)):
            if key[:, :, piece].shape[2]:
                parts.append(attend(query, key[:, :, piece], value[:, :, piece], bias=seen, **options))
        return [(out.reshape(shape), lse.reshape(shape[:3])) for out, lse in parts]

    def _layout(self, layer: int, query: Tensor, n_past: int) -> Layout:
        window = self.sliding[layer]
        heads = None if self.cells is None else self.cells[layer]
        key = (window, b"" if heads is None else heads.cpu().numpy().tobytes(), n_past)
        if key not in self._layouts:
            if n_past:  # an earlier decoding step's masks are never used again
                self._layouts = {known: layout for known, layout in self._layouts.items() if known[2] == n_past}
            n_kv = self.prefix[layer][0].shape[1] if self.prefix else 1
            self._layouts[key] = self._build_layout(window, heads, query, n_kv, n_past)
        return self._layouts[key]

    def _build_layout(self, window: int | None, heads: Tensor | None, query: Tensor, n_kv: int, n_past: int) -> Layout:
        device, first, dtype = self.hidden.device, self.first, query.dtype
        n_rows, n_heads, n_query, _ = query.shape
        none_hidden = heads is not None and not bool(heads.any())
        hidden = torch.zeros_like(self.hidden) if none_hidden else self.hidden
        if heads is None or none_hidden or bool(heads.all()):
            per_head = torch.ones(1, dtype=torch.bool, device=device)
        else:
            per_head = heads.to(device)
        positions = first + n_past + torch.arange(n_query, device=device)
        last = int(positions[-1])
        n_total = n_past + n_query
        before = torch.arange(first, device=device)
        touched = hidden[:, :first].any(0)
        alive = torch.ones_like(touched)
        if window is not None:
            touched |= before <= last - window
            alive = before > int(positions[0]) - window
        mixed = torch.where(touched & alive)[0]
        seen_by_all = torch.where(~touched & alive)[0]
        # A slice is a view: with nothing hidden nothing is copied.
        common = slice(0, first) if seen_by_all.numel() == first else seen_by_all
        own = hidden[:, first : first + n_total].any(0)
        n_masked = int(own.nonzero()[-1]) + 1 if bool(own.any()) else 0
        if window is not None and n_total > window:
            n_masked = n_total
        # Copying the prefix [kv, first] for keys and values, against about four outputs [head, query] read and written.
        joined = first > 0 and not n_past and bool(touched.any() | own.any()) and first * n_kv < 4 * n_query * n_heads

        def bias(keys: Tensor) -> Tensor:
            return self._visible(hidden, keys, positions, window, per_head)

        if joined:
            mixed, n_masked = mixed[:0], 0
        return Layout(
            common=common,
            mixed=mixed,
            mixed_bias=as_bias(self._fold(bias(mixed), n_heads, n_kv, n_rows), dtype),
            n_masked=n_masked,
            private_bias=as_bias(bias(first + torch.arange(n_masked, device=device)), dtype),
            joined_bias=as_bias(bias(torch.arange(first + n_total, device=device)), dtype) if joined else None,
        )

    def _visible(
        self, hidden: Tensor, keys: Tensor, positions: Tensor, window: int | None, per_head: Tensor
    ) -> Bool[Tensor, "b h q k"]:
        """Which of `keys` (positions) each query sees, [row, head | 1, query, key]."""
        seen = keys[None, :] <= positions[:, None]
        if window is not None:
            seen &= keys[None, :] > positions[:, None] - window
        cut = positions[None, :] >= self.cut[:, None]
        masked = hidden[:, None, None, keys] & cut[:, None, :, None] & per_head[None, :, None, None]
        return seen & ~masked

    @staticmethod
    def _fold(visible: Tensor, n_heads: int, n_kv: int, n_rows: int) -> Bool[Tensor, "g kv bq k"]:
        n_query, n_key = visible.shape[2:]
        if visible.shape[1] == 1:
            return visible.reshape(1, 1, n_rows * n_query, n_key)
        split = visible.reshape(n_rows, n_kv, n_heads // n_kv, n_query, n_key)
        return split.permute(2, 1, 0, 3, 4).reshape(n_heads // n_kv, n_kv, n_rows * n_query, n_key)
