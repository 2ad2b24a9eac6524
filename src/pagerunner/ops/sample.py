"""From logits to tokens: the most likely token, or a token drawn after temperature, min-p, top-k and top-p.

What a row asks for lies on the device, by slot (`SlotSettings`), so that a step needs nothing of the host and one graph
serves every mixture of rows. A drawn token is the inverse of the row's cumulative distribution, in the order of the
vocabulary, at the uniform number of (seed, position); see `ops/philox.py`. Other rows have no influence on it.

Every filter is a bound on the logit, so a token is kept or dropped by its logit alone. A token that ties with the last kept token
is kept too. So the result doesn't depend on any sorting order. Order of application: temperature, min-p,
top-k, top-p on what is left (renormalised). Take the tokens that min-p and
top-k leave: top-p keeps one of them if those with larger logits weigh less than p times the weight of all.

Shape letters: S rows, N rows that draw, M rows among them with top-k or top-p, V vocabulary, K candidates.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.native import small
from pagerunner.ops.philox import uniforms

# How many of the most likely tokens are sorted before a row is sorted as a whole.
CANDIDATES = (256, 4096)
_BLOCK = 256

SEED, SCALES, TOP_K, TOP_P, WORDS = 0, 1, 2, 3, 4  # words of 8 bytes of a slot
TEMPERATURE, MIN_P = 2 * SCALES, 2 * SCALES + 1  # the same memory as float32


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """How the tokens of each slot are drawn: `words` int64 [slots, WORDS] on the device, and the same memory as numbers.

    Word 0 is the seed; word 1 holds the temperature and min-p as two float32; word 2 is top-k; word 3 is top-p as float64.
    Temperature 0 is greedy; a top-k of 0, a top-p of 1 and a min-p of 0 are off.
    """

    words: torch.Tensor

    @classmethod
    def empty(cls, slots: int, device: torch.device | str) -> SlotSettings:
        """Greedy slots."""
        return cls(torch.zeros((slots, WORDS), dtype=torch.int64, device=device))

    @staticmethod
    def pack(*, seed: int, temperature: float, min_p: float, top_k: int, top_p: float) -> tuple[int, int, int, int]:
        """The words of one slot. The temperature must be 0 or in float32's range."""
        scales, p = struct.unpack("<qq", struct.pack("<ffd", temperature, min_p, top_p))
        return seed, scales, top_k, p

    @property
    def scales(self) -> torch.Tensor:
        """float32 [slots, 2 * WORDS]: columns TEMPERATURE and MIN_P mean something."""
        return self.words.view(torch.float32)

    @property
    def top_p(self) -> torch.Tensor:
        """float64 [slots]."""
        return self.words.view(torch.float64)[:, TOP_P]


def greedy(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row, int64 [S], and its logit, float32 [S].

    The lowest id wins a tie. In a row with NaN the first NaN is taken, so that the logit tells.
    """
    if small.serves(logits_SV):
        return small.greedy(logits_SV)
    tokens_S1 = logits_SV.argmax(dim=-1, keepdim=True)
    return tokens_S1.squeeze(-1), logits_SV.gather(1, tokens_S1).squeeze(-1).float()


@gpu_kernel("sampling.sample")
def sample(
    logits_SV: torch.Tensor, slots_S: torch.Tensor, positions_S: torch.Tensor, settings: SlotSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, int64 [S], and the row's largest logit, float32 [S].

    Args:
        logits_SV: [S, V] of any floating dtype; rows may be apart.
        slots_S: int64 [S]; a row of slot -1 is padding and takes its most likely token.
        positions_S: int64 [S], the absolute positions of the tokens whose logits these are. The new token's
            position is one more. Its random number depends on that position.
        settings: by slot.

    Where the largest logit isn't finite there is no distribution: the token id is then in range but means nothing.
    """
    tokens_S, best_S = greedy(logits_SV)
    on_cpu = logits_SV.device.type == "cpu"
    if on_cpu and not settings.scales[:, TEMPERATURE].any():  # nobody draws, nor did a slot's last request
        return tokens_S, best_S
    own_S = slots_S.clamp(min=0)
    temperature_S = settings.scales[:, TEMPERATURE].index_select(0, own_S).masked_fill_(slots_S < 0, 0.0)
    if on_cpu:
        rows_N = (temperature_S > 0.0).nonzero().squeeze(-1)
    else:  # looking which rows draw would wait for the device
        rows_N = torch.arange(logits_SV.shape[0], device=logits_SV.device)
    if not rows_N.numel():
        return tokens_S, best_S
    own_N = own_S.index_select(0, rows_N)
    uniform_N = uniforms(settings.words[:, SEED][own_N], positions_S.index_select(0, rows_N) + 1)
    logits_NV, temperature_N = logits_SV.index_select(0, rows_N).float(), temperature_S.index_select(0, rows_N)
    drawn_N = _draw(logits_NV, best_S.index_select(0, rows_N), temperature_N, own_N, settings, uniform_N)
    drawn_N = torch.where(temperature_N > 0.0, drawn_N, tokens_S.index_select(0, rows_N))
    return tokens_S.index_copy_(0, rows_N, drawn_N), best_S


def _draw(
    logits_NV: torch.Tensor,
    best_N: torch.Tensor,
    temperature_N: torch.Tensor,
    own_N: torch.Tensor,
    settings: SlotSettings,
    uniform_N: torch.Tensor,
) -> torch.Tensor:
    """Tokens [N] of rows that draw; `own_N` are their slots."""
    min_p_N1 = settings.scales[:, MIN_P].index_select(0, own_N)[:, None]
    # The most likely token weighs exactly 1, so min-p is a bound on the weight itself.
    weights_NV = _weights(logits_NV, best_N[:, None], temperature_N[:, None])
    weights_NV.masked_fill_(weights_NV < min_p_N1, 0.0)
    top_k_N = settings.words[:, TOP_K].index_select(0, own_N)
    top_p_N = settings.top_p.index_select(0, own_N)
    vocab_size = logits_NV.shape[-1]
    cut_N = ((top_k_N > 0) & (top_k_N < vocab_size)) | (top_p_N < 1.0)
    cuts_M = cut_N.nonzero().squeeze(-1) if logits_NV.device.type == "cpu" else None
    if cuts_M is None or cuts_M.numel():
        rows = torch.arange(len(cut_N), device=cut_N.device) if cuts_M is None else cuts_M
        top_k_M = top_k_N.masked_fill(top_k_N == 0, vocab_size).clamp_(max=vocab_size).index_select(0, rows)
        top_p_M = top_p_N.masked_fill(top_p_N >= 1.0, float("inf")).index_select(0, rows)
        logits_MV, weights_MV = logits_NV.index_select(0, rows), weights_NV.index_select(0, rows)
        scale = (best_N[rows, None], temperature_N[rows, None])
        bound_M1 = _bounds(logits_MV, weights_MV, top_k_M, top_p_M, scale)
        weights_NV.index_copy_(0, rows, weights_MV.masked_fill_(logits_MV < bound_M1, 0.0))
    return invert(weights_NV, uniform_N)


def _weights(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return ((logits - best) / temperature).exp_()


def invert(weights_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """The token whose span of the cumulative weights (float64, vocabulary order) holds `uniform * total`.

    Never a token of weight 0. The sum is taken over blocks first, then inside the block that holds the target: a
    running sum over the whole vocabulary is an order of magnitude slower.
    """
    vocab_size = weights_NV.shape[-1]
    rows, whole = weights_NV.shape[0], vocab_size // _BLOCK
    masses_NB = weights_NV[:, : whole * _BLOCK].view(rows, whole, _BLOCK).sum(dim=-1, dtype=torch.float64)
    if vocab_size % _BLOCK:
        rest_N1 = weights_NV[:, whole * _BLOCK :].sum(dim=-1, keepdim=True, dtype=torch.float64)
        masses_NB = torch.cat((masses_NB, rest_N1), dim=1)
    blocks_NB = masses_NB.cumsum(dim=-1)
    block_N1, left_N1 = first_above(blocks_NB, uniform_N[:, None] * blocks_NB[:, -1:])
    ids_NK = block_N1 * _BLOCK + torch.arange(_BLOCK, device=weights_NV.device)
    inside_NK = weights_NV.gather(1, ids_NK.clamp(max=vocab_size - 1)).to(torch.float64)
    inside_NK.masked_fill_(ids_NK >= vocab_size, 0.0)
    place_N1, _ = first_above(inside_NK.cumsum(dim=-1), left_N1)
    return (block_N1 * _BLOCK + place_N1).squeeze(-1).clamp_(max=vocab_size - 1)


def first_above(cumulative_NK: torch.Tensor, target_N1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first entry at which the running sum exceeds the target, and the part of the target that lies inside it.

    An entry of mass 0 doesn't raise the sum, so it is never the first. If rounding has lifted the target to the total, no entry
    would exceed it. Such a target is lowered by one ulp.
    """
    total_N1 = cumulative_NK[:, -1:]
    target_N1 = torch.minimum(target_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    index_N1 = torch.searchsorted(cumulative_NK, target_N1, right=True).clamp_(max=cumulative_NK.shape[-1] - 1)
    before_N1 = cumulative_NK.gather(1, (index_N1 - 1).clamp(min=0)).masked_fill_(index_N1 == 0, 0.0)
    return index_N1, target_N1 - before_N1


def _bounds(
    logits_MV: torch.Tensor,
    weights_MV: torch.Tensor,
    top_k_M: torch.Tensor,
    top_p_M: torch.Tensor,
    scale: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The smallest logit that each row keeps, [M, 1]. `scale`: the rows' largest logits and temperatures, [M, 1] each.

    The bound mostly lies among the first few hundred tokens, so partial sorts are tried first, but only on the CPU,
    because looking whether that was enough would wait for a GPU.
    """
    vocab_size = logits_MV.shape[-1]
    sizes = [size for size in CANDIDATES if size < vocab_size // 4] if logits_MV.device.type == "cpu" else []
    bound_M1 = torch.empty_like(logits_MV[:, :1])
    open_rows = torch.arange(logits_MV.shape[0], device=logits_MV.device)
    for size in sizes:
        candidates = logits_MV.topk(size, dim=-1).values
        bound, settled = _bound_among(candidates, logits_MV, weights_MV, top_k_M, top_p_M, scale)
        bound_M1[open_rows] = bound
        left = (~settled).nonzero().squeeze(-1)
        if left.numel() == 0:
            return bound_M1
        open_rows, logits_MV, weights_MV = open_rows[left], logits_MV[left], weights_MV[left]
        top_k_M, top_p_M, scale = top_k_M[left], top_p_M[left], (scale[0][left], scale[1][left])
    ordered = logits_MV.sort(dim=-1, descending=True).values
    bound_M1[open_rows], _ = _bound_among(ordered, logits_MV, weights_MV, top_k_M, top_p_M, scale)
    return bound_M1


def _bound_among(
    candidates_MK: torch.Tensor,
    logits_MV: torch.Tensor,
    weights_MV: torch.Tensor,
    top_k_M: torch.Tensor,
    top_p_M: torch.Tensor,
    scale: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest logit that is kept, [M, 1], and whether the candidates (descending) sufficed to find it.

    A candidate is kept while fewer than k candidates stand before it, and while these weigh less than p times the weight of all
    tokens that top-k leaves.
    """
    num_candidates = candidates_MK.shape[-1]
    last_M1 = (top_k_M.clamp(max=num_candidates) - 1)[:, None]
    has_k_M1 = (top_k_M <= num_candidates)[:, None]
    kth_M1 = candidates_MK.gather(1, last_M1).masked_fill(~has_k_M1, float("-inf"))
    mass_M1 = weights_MV.masked_fill(logits_MV < kth_M1, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    # Candidates that min-p has dropped count here with weight 0, and the mass is used up before the first of these.
    inclusive_MK = _weights(candidates_MK, *scale).cumsum(dim=-1, dtype=torch.float64)
    budget_M1 = top_p_M[:, None] * mass_M1
    kept_M1 = (inclusive_MK < budget_M1).sum(dim=-1, keepdim=True)  # candidates that leave room for one more
    # A top-k beyond the candidates leaves a mass that isn't known yet.
    no_k_M1 = (top_k_M == logits_MV.shape[-1])[:, None]
    settled_M = (has_k_M1 | (no_k_M1 & (kept_M1 < num_candidates))).squeeze(-1)
    return candidates_MK.gather(1, torch.minimum(kept_M1, last_M1)), settled_M
