"""What the FlashInfer backends use of that library, in plain torch: wrappers that know nothing but their own buffers.

Arguments are bound as the library binds them (see `flashinfer_signatures`), and refused where its kernels would fail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from helpers.flashinfer_signatures import recorded
from pagerunner.ops.dispatch import gpu_kernel

IGNORED = {"max_token_per_sequence"}  # what changes how fast the library plans, and nothing else


def as_declared(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method called with the library's parameters, of which it must name all that a caller gives."""
    names = method.__code__.co_varnames[1 : method.__code__.co_argcount]

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = recorded(f"{type(self).__name__}.{method.__name__}").bind(self, *args, **kwargs)
        assert set(bound.arguments) <= {"self", *names} | IGNORED, f"{method.__name__} was given what the fake ignores"
        bound.apply_defaults()
        return method(self, *(bound.arguments[name] for name in names))

    return call


def check_layout(*pages: torch.Tensor) -> None:
    """Kernels load 16 bytes at a time, which must be adjacent."""
    for x in pages:
        assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0, "rows of a page must be whole, and begin at 16 bytes"
        assert not any(stride * x.itemsize % 16 for stride in x.stride()[:-1]), "strides must be multiples of 16 bytes"


@gpu_kernel("nothing")
def _run(q: torch.Tensor, wrapper: Any, *others: torch.Tensor) -> torch.Tensor:
    """A kernel as far as graphs are concerned: it reads the wrapper's buffers whenever it is replayed."""
    found: torch.Tensor = wrapper.attend(q, *others)
    return found


class Wrapper:
    """Keeps what `plan` gave it: in graph mode in the buffers that it was made with, whose sizes it holds to."""

    def __init__(self, workspace: torch.Tensor, graph: bool, *buffers: torch.Tensor | None) -> None:
        assert workspace.dtype == torch.uint8 and not workspace.any()
        assert all((x is not None) == graph for x in buffers)
        self.buffers: tuple[Any, ...] = buffers if graph else ()
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

    @as_declared
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        qo_indptr_buf: torch.Tensor | None,
        paged_kv_indptr_buf: torch.Tensor | None,
        paged_kv_indices_buf: torch.Tensor | None,
        paged_kv_last_page_len_buf: torch.Tensor | None,
        backend: str,
    ) -> None:
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        super().__init__(float_workspace_buffer, use_cuda_graph, *buffers)
        assert kv_layout == "NHD" and backend in ("fa2", "fa3")

    @as_declared
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """See the library."""
        self.keep(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.queries = self.tokens or int(qo_indptr[-1])  # those of the capture, when `run` is called for a graph
        self.page_size, self.scale, self.softcap = page_size, sm_scale, logits_soft_cap
        self.dtypes, self.heads = (q_data_type, kv_data_type), (num_qo_heads, num_kv_heads, head_dim_qk)
        assert causal and num_qo_heads % num_kv_heads == 0

    @as_declared
    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """See the library."""
        k, v = paged_kv_cache
        check_layout(q, k, v)
        assert k.stride() == v.stride() and k.shape[1] == self.page_size
        assert (q.dtype, k.dtype) == self.dtypes and v.dtype == k.dtype
        assert (q.shape[0], q.shape[1], k.shape[2], q.shape[2]) == (self.queries, *self.heads)
        return _run(q, self, k, v)

    def attend(self, q: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        """What `run` is, every time a graph replays it."""
        out = torch.zeros(*q.shape[:2], kv[1].shape[-1], dtype=q.dtype)
        for queries, pages, length in self.rows(self.page_size, last_page=True):
            count = queries.stop - queries.start
            if not count:
                continue
            k, v = (x[pages].flatten(0, 1)[:length].double().repeat_interleave(q.shape[1] // x.shape[2], 1) for x in kv)
            scores = torch.einsum("qhd,lhd->hql", q[queries].double(), k) * self.scale
            if cap := self.softcap:
                scores = torch.tanh(scores / cap) * cap
            at, mine = torch.arange(length), length - count + torch.arange(count).unsqueeze(-1)
            hidden = at > mine
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[queries] = torch.einsum("hql,lhd->qhd", weights, v).to(q.dtype)
        return out


class BatchMLAPagedAttentionWrapper(Wrapper):
    """Attention of one query per row in the latent space."""

    @as_declared
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool,
        qo_indptr: torch.Tensor | None,
        kv_indptr: torch.Tensor | None,
        kv_indices: torch.Tensor | None,
        kv_len_arr: torch.Tensor | None,
    ) -> None:
        super().__init__(float_workspace_buffer, use_cuda_graph, qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @as_declared
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """See the library."""
        self.keep(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        self.page_size, self.scale = page_size, sm_scale
        self.dtypes, self.heads, self.dims = (q_data_type, kv_data_type), num_heads, (head_dim_ckv, head_dim_kpe)
        assert qo_indptr.tolist() == list(range(len(kv_len_arr) + 1)) and not causal

    @as_declared
    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """See the library."""
        check_layout(q_nope, q_pe, ckv_cache, kpe_cache, out)
        assert q_nope.dtype == q_pe.dtype == out.dtype and out.shape == q_nope.shape
        assert (q_nope.dtype, ckv_cache.dtype) == self.dtypes and kpe_cache.dtype == ckv_cache.dtype
        assert q_nope.shape[1] == q_pe.shape[1] == self.heads and ckv_cache.shape[1] == self.page_size
        assert all((x.shape[-1], y.shape[-1]) == self.dims for x, y in ((q_nope, q_pe), (ckv_cache, kpe_cache)))
        return _run(q_nope, self, q_pe, ckv_cache, kpe_cache, out)

    def attend(self, q: torch.Tensor, q_rope: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        """What `run` is, every time a graph replays it."""
        ckv, kpe, out = kv
        for queries, pages, length in self.rows(self.page_size, last_page=False):
            if length:
                c, p = (x[pages].flatten(0, 1)[:length].double() for x in (ckv, kpe))
                scores = torch.einsum("qhc,lc->hql", q[queries].double(), c)
                scores += torch.einsum("qhp,lp->hql", q_rope[queries].double(), p)
                weights = (scores * self.scale).softmax(-1)
                out[queries] = torch.einsum("hql,lc->qhc", weights, c).to(q.dtype)
        return out
