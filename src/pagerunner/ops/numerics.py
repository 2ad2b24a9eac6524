"""The numerics policy of an engine: which kernel serves how many rows, and into how many parts sums are cut. It is chosen at the start.

Two kernels of one operation make their sums in different orders, so a choice by what a step holds changes a result's last bits.

- `FAST` goes by the step: each number below is a border at which another kernel becomes faster. The pages of docs/performance/ have the measurements.
- `FIXED` (`batch_invariant`) goes by the model's shapes alone. Products are one library's without work space, attention is one kernel with pieces at
  absolute positions, and experts' products are kernels that take all inputs of an output in ascending order.

What a kernel's own tiles are, once it is chosen, stands beside the kernel. With those of `FIXED` tiles don't change bits. So do borders of attention to latents and
vectors, which no fixed engine has (`kernels/latent/latent_wide.py`, `latent_decode.py`, `sparse_latents.py`, `vectors_attention.py`).

Kernels read `numerics.FAST` when they are called, so that a test can put other numbers there.
"""

from __future__ import annotations

from typing import NamedTuple


class ProductBorders(NamedTuple):
    """Products with one matrix. `*_tokens` are tokens of a step, `*_weights` numbers of a matrix.

    Matrices in 16 bits: one token has a kernel of its own; `held` are kernels whose weights go into registers, `dense` those whose weights go
    ahead into shared memory, `few` those of small matrices. cuBLAS has all others. Where two serve, the one named first here does.
    """

    held_tokens: range = range(2, 9)
    held_weights: int = 1 << 25
    held_gated_weights: int = 1 << 24
    dense_tokens: range = range(2, 65)
    least_dense_weights: int = 1 << 20
    """Smaller matrices are `few`'s, which is one launch."""
    most_dense_weights: int = 1 << 27
    """Larger matrices, such as a vocabulary's, take so long that an early start is nothing."""
    few_tokens: int = 16
    few_weights: int = 1 << 23
    """For larger ones cuBLAS, with separate kernels for norm and gate, was at least as fast."""
    rounded_tokens: int = 17
    """From so many tokens on inputs are rounded to 8 bits, where the weights' writer means it so."""
    early_tokens: int = 2
    """From so many on, where that has a kernel whose weights are on their way early, `linear_eight`."""
    early_fp4_tokens: int = 3
    early_int4_tokens: int = 5
    """From so many on `linear_wide` has MXFP4 and NVFP4, and int4. With fewer, codes that go straight into registers were faster."""
    early_other_tokens_4: int = 1
    early_other_tokens_8: int = 9
    """The same for codes of 4 bits that no kernel brings straight into registers, and for those of 8 bits whose inputs stay as they are."""
    library_tokens: int = 32
    library_tiles: int = 64
    """With more of both and scales of blocks, cuBLAS multiplies rounded inputs, where it has such a product."""
    converted_tokens_8: int = 256
    converted_tokens_4: int = 512
    """Up to so many, weights of 8 or 4 bits are converted in registers. For more they are unpacked first."""
    parted_tokens: int = 2048
    """From so many on, a matrix is unpacked in small parts. With fewer, such parts leave multiprocessors idle."""


class ExpertBorders(NamedTuple):
    """Products with experts' matrices, in pairs of a token and an expert, for each expert on average."""

    packed: float = 0.5
    """Up to so many, and for one token, each pair reads its expert's codes by itself."""
    lanes: int = 14
    """Up to so many, codes of 4 bits are converted in the lanes that load them; up to `streams`, in a stream of their own."""
    few: int = 16
    few_plain: int = 24
    """Up to so many both products are one launch: with stored weights, and with weights in the model's dtype."""
    few_large: int = 96
    """The same with weights in the model's dtype, 16 bits, of experts of many inner features, whose bytes take longer than the products."""
    unpacked: int = 96
    """With more, stored matrices are unpacked before the products, if no kernel multiplies with their codes."""
    many: int = 128
    """With more, tiles are as large as they get."""
    blocks: int = 24
    """With more, e4m3 with scales of blocks has tiles of 128 pairs, which warps of their own copy. With as many as `few_plain` the warm-up needs no further number of tokens."""
    codes: int = 256
    """With more, codes of 4 bits are unpacked too. It is more than `unpacked`, so plans of memory count enough."""
    streams: int = 700


class RouterBorders(NamedTuple):
    """Scores of experts, in tokens of a step."""

    few_tokens: int = 16
    """Up to so many, each token has programs of its own."""
    few_logits: int = 4096
    """And with more tokens, up to so many scores, as their experts' weights are little to read again."""
    most_tokens: int = 128
    """Up to so many, norm and scores may be one kernel."""

    def are_few(self, tokens: int, experts: int) -> bool:
        """Whether each token has programs of its own."""
        return tokens <= self.few_tokens or tokens <= self.most_tokens and tokens * experts <= self.few_logits


class AttentionBorders(NamedTuple):
    """Attention to pages of keys and values."""

    few_rows: int = 16
    """Fewer rows do not occupy the device: each is cut into parts."""
    few_units: int = 256
    """Nor do so many rows times heads of keys, or fewer."""
    row_parts: int = 256
    """Of a row with one head of keys in steps of few rows. With more heads it has fewer, as their parts run at once, but up to 32."""
    draft_parts: int = 16
    """The same where a part has the heads of several tokens."""
    sharing_rows: int = 16
    """Steps of fewer rows don't look for pages that all rows share."""
    shared_saving: int = 16384
    """Tokens whose reading a shared prefix must spare."""
    shared_parts: int = 8
    """Of a shared prefix, because every row adds up the results of all parts."""
    small_rows: int = 64
    """Rows with fp8 pages: up to so many short rows, large tiles leave too much of the device idle."""
    short_queries: int = 2048
    """New tokens. Up to so many in most rows, heads of 256 bytes take smaller tiles."""
    short_window: int = 256
    """Keys. Heads of 128 bytes with such windows take smaller tiles."""
    wide_queries: int = 256
    """New tokens. From so many in most rows on, heads of 64 to 256 elements have a kernel in Gluon. Shorter rows weren't measured."""
    wide_window: int = 512
    """Keys. The kernel in Gluon takes such windows and longer ones."""
    divided_queries: int = 16
    """The same where blocks see so many keys that these are divided among programs."""
    library_queries: int = 4096
    """Rows of new tokens that come in multiples of this go to cuDNN, where the kernel in Gluon doesn't serve them."""
    short_latent_queries: int = 64
    """New tokens. Keys and values of longer rows are expanded from latents."""
    library_latent_queries: int = 4096
    """As `library_queries`, with keys and values that are expanded from latents: cuDNN takes 50 ms to prepare for a length."""


class Fast(NamedTuple):
    """Kernels by what a step holds."""

    products: ProductBorders = ProductBorders()
    experts: ExpertBorders = ExpertBorders()
    router: RouterBorders = RouterBorders()
    attention: AttentionBorders = AttentionBorders()


class Fixed(NamedTuple):
    """Kernels by a model's shapes. Whoever changes a number here changes bits, but not that they are the same for every step."""

    piece: int = 256
    """Attention's keys of a piece, at absolute positions."""
    keys: int = 64
    """Of a tile of attention."""
    exact_keys: int = 32
    exact_rows: int = 32
    """The same in float32."""
    query_rows: int = 64
    """Of a prompt's tile of attention: heads of tokens. It changes no bits."""
    tile_pairs: int = 64
    """Pairs of an expert that a tile has where products aren't the matrix units' with bulk copies."""
    routed_tokens: int = 4096
    """Experts are chosen by the program that is the fastest for so many tokens, for any number."""


FAST = Fast()
FIXED = Fixed()
