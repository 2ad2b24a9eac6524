"""What the FlashInfer backends use of that library, in plain torch: wrappers that know nothing but their own buffers."""

from __future__ import annotations

from typing import Any

import torch

from pagerunner.ops.dispatch import gpu_kernel


@gpu_kernel("nothing")
def _run(q: torch.Tensor, wrapper: Any, *others: torch.Tensor) -> torch.Tensor:
    """A kernel as far as graphs are concerned: it reads the wrapper's buffers whenever it is replayed."""
    found: torch.Tensor = wrapper.attend(q, *others)
    return found


class Wrapper:
    """Keeps what `plan` gave it: in graph mode in the buffers that it was made with, whose sizes it holds to."""

    def __init__(self, workspace: torch.Tensor, *buffers: torch.Tensor) -> None:
        assert workspace.dtype == torch.uint8 and not workspace.any()
        self.buffers = buffers
        self.tokens: int | None = None

    def keep(self, *tensors: torch.Tensor) -> None:
        """Query starts, page starts, indices, and lengths of rows; all int32, all but the indices on the host."""
        assert all(x.dtype == torch.int32 for x in tensors)
        if not self.buffers:
            self.kept = tuple(x.clone() for x in tensors)
            return
        tokens = int(tensors[0][-1])
        self.tokens = self.tokens or tokens
        assert tokens <= self.tokens
        for mine, given in zip(self.buffers, tensors, strict=True):
            exact = given is not tensors[2]
            assert len(given) == len(mine) if exact else len(given) <= len(mine)
            mine[: len(given)] = given
        self.kept = self.buffers

    def rows(self, page_tokens: int, *, last_page: bool) -> list[tuple[slice, torch.Tensor, int]]:
        """By row: its queries, its pages, and the tokens in them."""
        found = []
        query_start, page_start, indices, lengths = self.kept
        for row, length in enumerate(lengths.tolist()):
            pages = indices[int(page_start[row]) : int(page_start[row + 1])].long()
            if last_page:
                length += max(len(pages) - 1, 0) * page_tokens
            found.append((slice(int(query_start[row]), int(query_start[row + 1])), pages, length))
        return found


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Causal attention; the queries of a row are its last tokens."""

    def __init__(
        self, workspace: torch.Tensor, layout: str, graph: bool = False, *buffers: torch.Tensor, backend: str
    ) -> None:
        super().__init__(workspace, *buffers)
        assert layout == "NHD" and graph == bool(buffers) and backend in ("fa2", "fa3")

    def plan(
        self,
        query_start: torch.Tensor,
        page_start: torch.Tensor,
        indices: torch.Tensor,
        last: torch.Tensor,
        heads: int,
        kv_heads: int,
        dim: int,
        page_tokens: int,
        **more: Any,
    ) -> None:
        """See the library."""
        self.keep(query_start, page_start, indices, last)
        self.page_tokens, self.more = page_tokens, more
        assert more["causal"] and heads % kv_heads == 0 and dim

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """See the library."""
        return _run(q, self, *kv)

    def attend(self, q: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        """What `run` is, every time a graph replays it."""
        assert self.more["q_data_type"] == q.dtype and self.more["kv_data_type"] == kv[0].dtype
        out = torch.zeros(*q.shape[:2], kv[1].shape[-1], dtype=q.dtype)
        for queries, pages, length in self.rows(self.page_tokens, last_page=True):
            count = queries.stop - queries.start
            if not count:
                continue
            k, v = (x[pages].flatten(0, 1)[:length].double().repeat_interleave(q.shape[1] // x.shape[2], 1) for x in kv)
            scores = torch.einsum("qhd,lhd->hql", q[queries].double(), k) * self.more["sm_scale"]
            if cap := self.more["logits_soft_cap"]:
                scores = torch.tanh(scores / cap) * cap
            at, mine = torch.arange(length), length - count + torch.arange(count).unsqueeze(-1)
            hidden = at > mine
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[queries] = torch.einsum("hql,lhd->qhd", weights, v).to(q.dtype)
        return out


class BatchMLAPagedAttentionWrapper(Wrapper):
    """Attention of one query per row in the latent space."""

    def __init__(self, workspace: torch.Tensor, graph: bool = False, *buffers: torch.Tensor) -> None:
        super().__init__(workspace, *buffers)
        assert graph == bool(buffers)

    def plan(
        self,
        query_start: torch.Tensor,
        page_start: torch.Tensor,
        indices: torch.Tensor,
        lengths: torch.Tensor,
        heads: int,
        latent: int,
        rope: int,
        page_tokens: int,
        causal: bool,
        scale: float,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> None:
        """See the library."""
        self.keep(query_start, page_start, indices, lengths)
        self.page_tokens, self.scale = page_tokens, scale
        assert query_start.tolist() == list(range(len(lengths) + 1)) and not causal and dtype == kv_dtype and heads

    def run(
        self, q: torch.Tensor, q_rope: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """See the library."""
        return _run(q, self, q_rope, ckv, kpe, out)

    def attend(self, q: torch.Tensor, q_rope: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        """What `run` is, every time a graph replays it."""
        ckv, kpe, out = kv
        for queries, pages, length in self.rows(self.page_tokens, last_page=False):
            if length:
                c, p = (x[pages].flatten(0, 1)[:length].double() for x in (ckv, kpe))
                scores = torch.einsum("qhc,lc->hql", q[queries].double(), c)
                scores += torch.einsum("qhp,lp->hql", q_rope[queries].double(), p)
                weights = (scores * self.scale).softmax(-1)
                out[queries] = torch.einsum("hql,lc->qhc", weights, c).to(q.dtype)
        return out
