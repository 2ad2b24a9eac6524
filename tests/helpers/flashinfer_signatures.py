"""The parameters of what the FlashInfer backends call, as flashinfer-python 0.6.14 declares them."""

from __future__ import annotations

import inspect
from functools import cache

RECORDED = {
    "BatchPrefillWithPagedKVCacheWrapper.__init__": """
        self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None,
        backend='auto', jit_args=None, jit_kwargs=None""",
    "BatchPrefillWithPagedKVCacheWrapper.plan": """
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None, o_data_type=None, non_blocking=True,
        prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None,
        seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None, max_sequence_kv=None,
        fixed_split_size=None, disable_split_kv=False""",
    "BatchPrefillWithPagedKVCacheWrapper.run": """
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None""",
    "BatchMLAPagedAttentionWrapper.__init__": """
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
        kv_len_arr=None, backend='auto'""",
    "BatchMLAPagedAttentionWrapper.plan": """
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
        sm_scale, q_data_type, kv_data_type, use_profiler=False""",
    "BatchMLAPagedAttentionWrapper.run": """
        self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None,
        kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None, *, ckv_scale=None, kpe_scale=None""",
}


@cache
def recorded(name: str) -> inspect.Signature:
    """The signature of "Class.method"."""
    return inspect.signature(eval(f"lambda {' '.join(RECORDED[name].split())}: None"))


def plain(signature: inspect.Signature) -> list[tuple[str, str, object]]:
    """Names, kinds and defaults, without annotations."""
    return [(p.name, p.kind.name, p.default) for p in signature.parameters.values()]
