"""Attention in plain torch: the CPU backend, and the twin that GPU backends are compared with.

Exact under every condition that the scheduler can make: chunks with a past, rows that share pages with rows of the same
step, and page slots that hold NaN because nothing was written there. `torch_plan` says how a step is divided. Shape
letters: T tokens of the step, B rows of one call, Q queries of a row, L key slots, H query heads, K key/value heads,
G query heads per key/value head, D head size.
"""

from __future__ import annotations

import torch

from pagerunner.attention.torch_plan import NewPart, PaddedPart, Part, SharedPart, Slots, Tokens, make_plan
from pagerunner.batch import ForwardBatch, GroupBatch, LayerKV
from pagerunner.memory.specs import Spec
from pagerunner.ops.pages import SlotLayout, gather_slots, slot_layout, slot_rows, write_slots

Result = tuple[torch.Tensor, torch.Tensor]  # [B, K, Q, D] and its log-sum-exp [B, K, Q] float32


class TorchMetadata:
    """What a step's layers share: how it is divided, and (once a layer has asked) the rows its tokens go to."""

    __slots__ = ("_write_rows", "parts")

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts
        self._write_rows: dict[SlotLayout, torch.Tensor] = {}

    def write_rows(self, group: GroupBatch, layout: SlotLayout) -> torch.Tensor:
        """Row numbers for `write_slots`."""
        rows = self._write_rows.get(layout)
        if rows is None:
            rows = self._write_rows[layout] = slot_rows(group.write_entry, group.write_offset, layout)
        return rows


class Scratch:
    """Memory that one call gathers keys (0) and values (1) into, reused by every layer and step.

    Fresh memory of this size comes from the system page by page, which costs as much as the gather itself.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, which: int, rows: int, unit: int, like: torch.Tensor) -> torch.Tensor:
        """Memory of [rows, unit] elements on the device of `like`, and in its dtype."""
        key = (which, like.dtype, like.device)
        held = self._held.get(key)
        if held is None or held.numel() < rows * unit:
            with torch.inference_mode(False):
                held = self._held[key] = torch.empty(rows * unit, dtype=like.dtype, device=like.device)
        return held[: rows * unit].view(rows, unit)


class TorchBackend:
    """See the module. One instance serves one engine: its calls must not overlap."""

    name = "torch_ref"

    def __init__(self) -> None:
        self._scratch = Scratch()

    def unsupported(self, spec: Spec, device: str, dtype: torch.dtype) -> str | None:
        """Serves full attention with equal key and value heads on any device and in any floating dtype."""
        if spec.kind != "full":
            return f"it serves full attention only, not {spec.kind}"
        if getattr(spec, "head_dim_v", None) not in (None, getattr(spec, "head_dim", None)):
            return "it needs value heads of the same size as key heads"
        if (kept := getattr(spec, "dtype", None)) != (own := str(dtype).removeprefix("torch.")):
            return f"it needs kv_cache_dtype to equal the model's dtype: {kept} is not {own}"
        return None if dtype.is_floating_point else f"it does not compute in {dtype}"

    def plan(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        page_table_RP: torch.Tensor,
        page_tokens: int,
        query_start: torch.Tensor,
    ) -> TorchMetadata:
        """Divide the step into calls; `query_start` follows from `query_lens` and is not read."""
        return TorchMetadata(make_plan(query_lens, seq_lens, page_table_RP, page_tokens))

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        layer: LayerKV,
        group: GroupBatch,
        batch: ForwardBatch,
        scale: float,
    ) -> torch.Tensor:
        """Write k and v, then attend; [T, H, D]."""
        metadata: TorchMetadata = group.metadata
        for pages, values in ((layer.k, k_TKD), (layer.v, v_TKD)):
            layout = slot_layout(pages)
            write_slots(pages, metadata.write_rows(group, layout), values, layout)
        if len(metadata.parts) == 1:
            return _run(metadata.parts[0], q_THD, k_TKD, v_TKD, layer, scale, self._scratch)[0]
        out_THD = q_THD.new_empty(q_THD.shape)
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        for part in metadata.parts:
            out, lse = _run(part, q_THD, k_TKD, v_TKD, layer, scale, self._scratch)
            _store(part, out, lse, out_THD, lse_TH)
        return out_THD


def _run(
    part: Part,
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    layer: LayerKV,
    scale: float,
    scratch: Scratch,
) -> Result:
    """The part's own attention, [its tokens, H, D], and its log-sum-exp, [its tokens, H]."""
    if isinstance(part, PaddedPart):
        return _run_padded(part, q_THD, layer, scale, scratch)
    if isinstance(part, SharedPart):
        return _run_shared(part, q_THD, layer, scale, scratch)
    return _run_new(part, q_THD, k_TKD, v_TKD, scale)


def _take(x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    return x[tokens] if isinstance(tokens, slice) else x.index_select(0, tokens)


def _put(x: torch.Tensor, tokens: Tokens, values: torch.Tensor) -> None:
    if isinstance(tokens, slice):
        x[tokens] = values
    else:
        x.index_copy_(0, tokens, values)


def _store(part: Part, out: torch.Tensor, lse: torch.Tensor, out_THD: torch.Tensor, lse_TH: torch.Tensor) -> None:
    """Put a part's result in its place; what is there already (see `SharedPart`) is merged with it by weight."""
    targets = part.targets if isinstance(part, PaddedPart) else part.tokens
    if isinstance(part, SharedPart):
        old_lse = _take(lse_TH, targets)
        weight = torch.sigmoid(lse - old_lse).unsqueeze(-1).to(out.dtype)
        out = torch.lerp(_take(out_THD, targets), out, weight)
        lse = torch.logaddexp(old_lse, lse) if part.more else lse
    _put(out_THD, targets, out)
    if part.more:
        _put(lse_TH, targets, lse)


def _gather(slots: Slots, pages: torch.Tensor, which: int, dtype: torch.dtype, scratch: Scratch) -> torch.Tensor:
    layout = slot_layout(pages)
    rows = slots.rows(layout)
    return gather_slots(pages, rows, layout, dtype, scratch.take(which, rows.numel(), layout.unit, pages))


def _run_padded(part: PaddedPart, q_THD: torch.Tensor, layer: LayerKV, scale: float, scratch: Scratch) -> Result:
    _, num_heads, head_dim = q_THD.shape
    num_kv_heads = layer.k.shape[2]
    group, rows, queries = num_heads // num_kv_heads, part.rows, part.queries
    k_BKLD = (
        _gather(part.slots, layer.k, 0, q_THD.dtype, scratch).view(rows, -1, num_kv_heads, head_dim).transpose(1, 2)
    )
    v_BKLD = (
        _gather(part.slots, layer.v, 1, q_THD.dtype, scratch).view(rows, -1, num_kv_heads, head_dim).transpose(1, 2)
    )
    q_BQKGD = _take(q_THD, part.tokens).view(rows, queries, num_kv_heads, group, head_dim)
    q_BKgD = q_BQKGD.permute(0, 2, 3, 1, 4).reshape(rows, num_kv_heads, group * queries, head_dim)
    out, lse = attend(q_BKgD, k_BKLD, v_BKLD, scale, mask=part.mask(group, q_THD.dtype))
    out = out.view(rows, num_kv_heads, group, queries, head_dim).permute(0, 3, 1, 2, 4)
    lse = lse.view(rows, num_kv_heads, group, queries).permute(0, 3, 1, 2)
    out, lse = out.reshape(-1, num_heads, head_dim), lse.reshape(-1, num_heads)
    return (out, lse) if part.kept is None else (out.index_select(0, part.kept), lse.index_select(0, part.kept))


def _run_shared(part: SharedPart, q_THD: torch.Tensor, layer: LayerKV, scale: float, scratch: Scratch) -> Result:
    _, num_heads, head_dim = q_THD.shape
    num_kv_heads = layer.k.shape[2]
    group = num_heads // num_kv_heads
    # One row whose queries are all the tokens; key/value heads stand in the batch dimension, so that the query heads
    # of a group share them without a copy.
    k_K1LD = _gather(part.slots, layer.k, 0, q_THD.dtype, scratch).transpose(0, 1).unsqueeze(1)
    v_K1LD = _gather(part.slots, layer.v, 1, q_THD.dtype, scratch).transpose(0, 1).unsqueeze(1)
    q_KGTD = _take(q_THD, part.tokens).view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    size = (num_kv_heads, group, -1, head_dim)
    out, lse = attend(q_KGTD, k_K1LD.expand(size), v_K1LD.expand(size), scale)
    return out.permute(2, 0, 1, 3).reshape(-1, num_heads, head_dim), lse.permute(2, 0, 1).reshape(-1, num_heads)


def _run_new(part: NewPart, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, scale: float) -> Result:
    _, num_heads, head_dim = q_THD.shape
    num_kv_heads = k_TKD.shape[1]
    shape = (part.rows, part.queries, num_kv_heads, -1, head_dim)
    q_BQKGD, k_BQK1D, v_BQK1D = (x[part.tokens].view(shape) for x in (q_THD, k_TKD, v_TKD))
    if part.rows == 1:
        q, k, v = (x[0].permute(1, 2, 0, 3) for x in (q_BQKGD, k_BQK1D, v_BQK1D))
        out, lse = attend(q, k.expand(q.shape), v.expand(q.shape), scale, causal=True)
        return out.permute(2, 0, 1, 3).reshape(-1, num_heads, head_dim), lse.permute(2, 0, 1).reshape(-1, num_heads)
    q = q_BQKGD.flatten(2, 3).transpose(1, 2)
    k, v = (
        x.expand(q_BQKGD.shape).reshape(part.rows, part.queries, num_heads, head_dim).transpose(1, 2)
        for x in (k_BQK1D, v_BQK1D)
    )
    out, lse = attend(q, k, v, scale, causal=True)
    return out.transpose(1, 2).reshape(-1, num_heads, head_dim), lse.transpose(1, 2).reshape(-1, num_heads)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> Result:
    """Softmax attention with its log-sum-exp. q is [B, K, Q, D], k and v [B, K, L, D], the mask is added to scores.

    On CPU it is torch's own flash kernel, called directly because the public function doesn't return the log-sum-exp.
    """
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        result: Result = flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return result
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    out = torch.matmul(scores.softmax(-1), v.float()).to(q.dtype)
    return out, torch.logsumexp(scores, -1)
