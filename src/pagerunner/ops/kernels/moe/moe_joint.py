"""Experts' products whose time is that of reading the weights, and of forms that other kernels don't serve; see `ops/moe.py`.

Pairs of token and expert are ordered by expert; each tile of the products belongs to one expert. How many tiles there are
is known on the device only, so the grid is the largest number there can be, and surplus programs leave at once.
The first product computes gates and ups and stores what the activation makes of them.

With few pairs of an expert both products are one launch. The programs of the second product stand behind those of the first one, and a tile's
programs wait until those that make its inputs have counted themselves. A device starts programs in their order, so whatever a program waits
for runs already. So the device goes on reading weights while the last programs of the first product end.

Shape letters as in `ops/moe.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.ops import numerics
from pagerunner.ops.activation import GatedActivation
from pagerunner.ops.kernels.activation import CLAMPED_SWIGLU
from pagerunner.ops.kernels.codes import E2M1, INT4, ROW_SCALES
from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next_and_wait
from pagerunner.ops.kernels.moe.moe_tiles import add_step, find_tile, finish, kind_of, row_factors, serves, stored_args
from pagerunner.ops.moe import STEP, ExpertWeights, Shared
from pagerunner.ops.routing import TILE_PAIRS, Routes
from pagerunner.ops.stored import Stored

TILE = tl.constexpr(TILE_PAIRS)


@triton.jit
def _tile(x_ptr, w_ptr, s_ptr, z_ptr, r_ptr, w_expert, s_expert, bias_ptr, weights_ptr, order_ptr, starts_ptr, ready_ptr, out_ptr,
          out_row, active, num_tokens, limit, tile, block, SHARED: tl.constexpr, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
          BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr, G: tl.constexpr, BO: tl.constexpr,
          SCALES: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
          KIND: tl.constexpr, WEIGH: tl.constexpr, UPS: tl.constexpr, DOWNS: tl.constexpr, ALL: tl.constexpr):  # fmt: skip
    """BM pairs of one expert times BN of its N features.

    The first product (GATED) reads tokens' rows and stores what the activation makes of BN gates and ups, in expert order. The second
    product reads these rows and stores pairs in the tokens' order. WEIGH: results are multiplied by the pairs' weights.

    UPS: a tile's programs of the first product, which count themselves in `ready`. The second product waits for them, and the last of its DOWNS
    programs sets the counts back to 0. 0: the products are launches of their own.

    `starts` are where experts' pairs begin. With UPS and tiles of TILE pairs they are the places (`Tiles`) of up to 2 ALL tiles.

    SHARED: BM tokens and the matrices that all of them pass. The second product's rows are added to those of `out`.
    """
    step: tl.constexpr = 2 if KIND == CLAMPED_SWIGLU else 1
    ups: tl.constexpr = 1 if KIND == CLAMPED_SWIGLU else N
    outputs: tl.constexpr = 2 * N if GATED else N
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    FOUR: tl.constexpr = FORM == INT4 or FORM == E2M1
    if SHARED:
        expert, first_row, last_row = tile * 0, tile * BM, num_tokens
    elif UPS and BM == TILE:
        expert, first_row = tl.load(starts_ptr + tile), tl.load(starts_ptr + 2 * ALL + tile)
        last_row = tl.load(starts_ptr + 4 * ALL + tile)
    else:
        expert, first_row, last_row = find_tile(starts_ptr, tile, E, BE, BM)
    if expert < E:
        rows = first_row + tl.arange(0, BM)
        valid = rows < last_row
        if SHARED:
            pairs, source = rows, rows.to(tl.int64)
        else:
            pairs = tl.load(order_ptr + rows, mask=valid, other=0)
            source = (pairs // active if GATED else rows).to(tl.int64)
        features = block * BN + tl.arange(0, BN)
        live = features < N
        w_rows = features * step if GATED else features
        wide = expert.to(tl.int64)
        w, s, z, r = w_ptr + wide * w_expert, s_ptr + wide * s_expert, z_ptr + wide * s_expert, r_ptr + expert * outputs
        i = tl.arange(0, BK // 2 if FOUR else BK)
        cols = i // 16 * 32 + i % 16 if FOUR else i
        x_place = x_ptr + source[:, None] * K + cols[None, :]
        acc = tl.zeros((BM, BN), tl.float32)
        up = acc
        if UPS and not GATED:
            while tl.atomic_add(ready_ptr + 2 * tile, 0, sem="acquire", scope="gpu") < UPS:
                pass
        for first in range(0, K, BK):
            x = tl.load(x_place + first, mask=valid[:, None] & (cols < K - first)[None, :], other=0.0)
            x_high = x
            if FOUR:
                x_high = tl.load(x_place + first + 16, mask=valid[:, None] & (cols < K - first)[None, :], other=0.0)
            acc = add_step(acc, x, x_high, w, s, z, w_rows, live, first, K, G, BO, BK, FORM, WORDS, SCALES, ZEROS)
            if GATED:
                up = add_step(
                    up, x, x_high, w, s, z, w_rows + ups, live, first, K, G, BO, BK, FORM, WORDS, SCALES, ZEROS
                )
        acc = row_factors(acc, s, r, w_rows, live, BO, FORM, SCALES, FACTORS)
        if GATED:
            up = row_factors(up, s, r, w_rows + ups, live, BO, FORM, SCALES, FACTORS)
        y = finish(acc, up, bias_ptr + expert * outputs, weights_ptr, pairs, valid, w_rows, live, ups, limit, dtype,
                   BIAS, GATED, KIND, WEIGH)  # fmt: skip
        target = (rows if GATED else pairs).to(tl.int64)
        place = out_ptr + target[:, None] * out_row + features[None, :]
        inside = valid[:, None] & live[None, :]
        if SHARED and not GATED:
            y = (tl.load(place, mask=inside, other=0.0).to(tl.float32) + y.to(tl.float32)).to(dtype)
        tl.store(place, y, mask=inside)
        if UPS and GATED:
            tl.debug_barrier()  # all of the program's stores come before its count
            tl.atomic_add(ready_ptr + 2 * tile, 1, sem="release", scope="gpu")
        elif UPS:
            if tl.atomic_add(ready_ptr + 2 * tile + 1, 1, sem="relaxed", scope="gpu") == DOWNS - 1:
                tl.store(ready_ptr + 2 * tile, 0)
                tl.store(ready_ptr + 2 * tile + 1, 0)


@triton.jit(do_not_specialize=["active"])
def _grouped_kernel(x_ptr, w_ptr, s_ptr, z_ptr, r_ptr, w_expert, s_expert, bias_ptr, weights_ptr, order_ptr, starts_ptr,
                    out_ptr, active, limit, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BE: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr,
                    G: tl.constexpr, BO: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
                    FACTORS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
                    WEIGH: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One of the products."""
    start_next_and_wait(PDL)
    _tile(x_ptr, w_ptr, s_ptr, z_ptr, r_ptr, w_expert, s_expert, bias_ptr, weights_ptr, order_ptr, starts_ptr, starts_ptr,
          out_ptr, N, active, 0, limit, tl.program_id(0), tl.program_id(1), False, E, N, K, BE, BM, BN, BK, FORM, WORDS, G, BO, SCALES, ZEROS,
          FACTORS, BIAS, GATED, KIND, WEIGH, 0, 0, 0)  # fmt: skip


@triton.jit(do_not_specialize=["active", "tiles", "num_tokens"])
def _joint_kernel(x_ptr, w_ptr, s_ptr, z_ptr, r_ptr, w_expert, s_expert, bias_ptr, w2_ptr, s2_ptr, z2_ptr, r2_ptr, w2_expert,
                  s2_expert, bias2_ptr, sw_ptr, ss_ptr, sz_ptr, sr_ptr, sw2_ptr, ss2_ptr, sz2_ptr, sr2_ptr, weights_ptr, order_ptr,
                  places_ptr, ready_ptr, inner_ptr, out_ptr, shared_ptr, residual_ptr, residual_row, active, num_tokens, limit, tiles,
                  E: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr, BN2: tl.constexpr, BK2: tl.constexpr, WORDS: tl.constexpr, FORM: tl.constexpr,
                  G: tl.constexpr, BO: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr,
                  FORM2: tl.constexpr, G2: tl.constexpr, BO2: tl.constexpr, SCALES2: tl.constexpr, ZEROS2: tl.constexpr,
                  FACTORS2: tl.constexpr, BIAS: tl.constexpr, BIAS2: tl.constexpr, KIND: tl.constexpr, WEIGH: tl.constexpr,
                  SHARED: tl.constexpr, SM: tl.constexpr, SN: tl.constexpr, SN2: tl.constexpr, SG: tl.constexpr, SG2: tl.constexpr,
                  ALL: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Both products: all programs of the first one, expert by expert, then those of the second. WEIGH: the inputs are weighted.

    SHARED: inner features of what all tokens pass, or 0. Before each product its programs for that stand: SM tokens and SN or SN2 features.
    """
    start_next_and_wait(PDL)
    UPS: tl.constexpr = (INNER + BN - 1) // BN
    DOWNS: tl.constexpr = (D + BN2 - 1) // BN2
    SHARED_UPS: tl.constexpr = (SHARED + SN - 1) // SN
    SHARED_DOWNS: tl.constexpr = (D + SN2 - 1) // SN2
    program = tl.program_id(0)
    shared_tiles = num_tokens * 0
    if SHARED:
        shared_tiles = (num_tokens + SM - 1) // SM
    shared_ready = ready_ptr + 2 * tiles
    first = shared_tiles * SHARED_UPS  # of the experts' programs
    second = first + tiles * UPS  # of the second product's
    if SHARED and program < first:
        _tile(x_ptr, sw_ptr, ss_ptr, sz_ptr, sr_ptr, 0, 0, x_ptr, weights_ptr, order_ptr, places_ptr, shared_ready, shared_ptr, SHARED,
              active, num_tokens, limit, program // SHARED_UPS, program % SHARED_UPS, True, 1, SHARED, D, BE, SM, SN, BK, FORM,
              WORDS, SG, BO, SCALES, ZEROS, FACTORS, False, True, KIND, False, SHARED_UPS, SHARED_DOWNS, ALL)  # fmt: skip
    elif program < second:
        program -= first
        _tile(x_ptr, w_ptr, s_ptr, z_ptr, r_ptr, w_expert, s_expert, bias_ptr, weights_ptr, order_ptr, places_ptr, ready_ptr,
              inner_ptr, INNER, active, num_tokens, limit, program // UPS, program % UPS, False, E, INNER, D, BE, BM, BN, BK, FORM,
              WORDS, G, BO, SCALES, ZEROS, FACTORS, BIAS, True, KIND, WEIGH, UPS, DOWNS, ALL)  # fmt: skip
    elif SHARED and program < second + shared_tiles * SHARED_DOWNS:
        program -= second
        _tile(shared_ptr, sw2_ptr, ss2_ptr, sz2_ptr, sr2_ptr, 0, 0, x_ptr, weights_ptr, order_ptr, places_ptr, shared_ready,
              residual_ptr, residual_row, active, num_tokens, 0.0, program // SHARED_DOWNS, program % SHARED_DOWNS, True, 1, D, SHARED,
              BE, SM, SN2, BK2, FORM2, WORDS, SG2, BO2, SCALES2, ZEROS2, FACTORS2, False, False, 0, False, SHARED_UPS,
              SHARED_DOWNS, ALL)  # fmt: skip
    else:
        program -= second + shared_tiles * SHARED_DOWNS
        _tile(inner_ptr, w2_ptr, s2_ptr, z2_ptr, r2_ptr, w2_expert, s2_expert, bias2_ptr, weights_ptr, order_ptr, places_ptr,
              ready_ptr, out_ptr, D, active, num_tokens, 0.0, program // DOWNS, program % DOWNS, False, E, D, INNER, BE, BM, BN2, BK2,
              FORM2, WORDS, G2, BO2, SCALES2, ZEROS2, FACTORS2, BIAS2, False, 0, not WEIGH, UPS, DOWNS, ALL)  # fmt: skip


def most_pairs(pairs: int, experts: int) -> int:
    """Pairs of a tile, by measurement (docs/performance/experts.md)."""
    each = pairs / experts
    return TILE_PAIRS if each <= numerics.FAST.experts.few else 64 if each <= 128 else 128


def grouped_product(
    x: torch.Tensor,
    w_EOK: torch.Tensor | Stored,
    bias_EO: torch.Tensor | None,
    routes: Routes,
    activation: GatedActivation | None,
    *,
    weigh: bool,
    tile_pairs: int = 0,
) -> torch.Tensor:
    """The first product if there is an activation, [P, I] in expert order; else the second one, [P, D] in the tokens' order.

    `tile_pairs`: 16, 64 or 128 pairs of a tile; 0: what is fastest.
    """
    assert routes.order_P is not None and routes.starts_E1 is not None, "the pairs have no order"
    experts, outputs, inputs = w_EOK.shape
    features = outputs if activation is None else outputs // 2
    pairs, active = routes.order_P.shape[0], routes.experts_TA.shape[1]
    bm = tile_pairs or most_pairs(routes.expected, experts)
    bn, bk, warps, stages = {16: (64, 128, 4, 3), 64: (128, 64, 4, 3), 128: (256, 64, 8, 3)}[bm]
    tensors, constants = stored_args(w_EOK, x.dtype)
    if not isinstance(w_EOK, torch.Tensor):
        bn, bk = 64, STEP
    elif activation is not None and bm > 16:
        bn //= 2
    out = torch.empty(pairs, features, dtype=x.dtype, device=x.device)
    _grouped_kernel[(most_tiles(pairs, experts, bm), blocks(features, bn))](
        x, *tensors, x if bias_EO is None else bias_EO, routes.weights_TA, routes.order_P, routes.starts_E1, out,
        active, 0.0 if activation is None else activation.limit, E=experts, N=features, K=inputs, BE=padded(experts),
        BM=bm, BN=_width(bn, features), BK=_depth(bk, inputs), BIAS=bias_EO is not None,
        GATED=activation is not None, KIND=kind_of(activation), WEIGH=weigh, num_warps=warps, num_stages=stages,
        **constants, **dependent(x.device),
    )  # fmt: skip
    return out


class JointConfig(NamedTuple):
    """Tiles of both products in one launch: pairs; features and inputs of the first product and of the second; warps, and blocks in flight."""

    pairs: int
    features: int
    inputs: int
    down_features: int
    down_inputs: int
    warps: int
    stages: int


NARROW = 384
"""Inner features of experts, of which a program of the second product takes more outputs: it has few steps. Ranks' parts of experts are such. With
half as many or fewer its steps are smaller, too, so that a multiprocessor has room for five programs instead of three."""

WHOLE = 768
"""Inner features of experts, few of which have narrow tiles. With more, as Mixtral's 14,336, the device has work anyway."""

LARGE = 8192
"""Inner features of experts. Those with more, as Mixtral's 14,336, are one launch of many pairs too, as reading them takes longer than multiplying."""

MOST_ROWS = 16
"""Tokens up to which they are one tile of what all tokens pass."""


def joint_config(pairs: int, experts: int, inner: int, *, plain: bool) -> JointConfig:
    """The tiles of experts with so many `inner` features, by measurement (docs/performance/experts.md). `plain`: the weights are no codes."""
    if not plain:
        return JointConfig(TILE_PAIRS, 64, 128, 128, 128, 4, 3)
    if pairs > 36 * experts:  # where codes' tiles change, too: the warm-up needs no further number of tokens
        return JointConfig(8 * TILE_PAIRS, 64, 64, 128, 64, 8, 3)
    if pairs > numerics.FAST.experts.few * experts:
        return JointConfig(4 * TILE_PAIRS, 64, 64, 128, 64, 4, 4 if inner > LARGE else 3)
    if is_full(pairs, experts):
        return JointConfig(2 * TILE_PAIRS, 64, 64, 128, 64, 4, 4)
    if inner <= NARROW // 2:
        return JointConfig(TILE_PAIRS, 32, 128, 128, 64, 4, 3)
    if inner <= NARROW:
        return JointConfig(TILE_PAIRS, 64, 128, 128, 128, 4, 3)
    if are_few(pairs, experts) and inner <= WHOLE:
        return JointConfig(TILE_PAIRS, 32, 128, 64, 128, 4, 4)
    return JointConfig(TILE_PAIRS, 64, 128, 64, 128, 4, 3)


def shared_rows(tokens: int, config: JointConfig) -> int:
    """Tokens of a tile of what all tokens pass."""
    return MOST_ROWS if tokens <= MOST_ROWS else 2 * config.pairs


def are_few(pairs: int, experts: int) -> bool:
    """Whether experts of at most WHOLE features are so few that with narrow tiles more of the device has work: a rank's 32 of 128, from 33 to 64 tokens."""
    return experts <= 32 and 2 * experts < pairs <= 4 * experts


def is_full(pairs: int, experts: int) -> bool:
    """Whether many experts have more pairs than TILE_PAIRS."""
    return pairs > 10 * experts


def joint_products(
    x_TD: torch.Tensor,
    routes: Routes,
    experts: ExpertWeights,
    shared: Shared | None = None,
    residual_TD: torch.Tensor | None = None,
    config: JointConfig | None = None,
) -> torch.Tensor:
    """Both products, [P, D] in the tokens' order, in one launch. The output of `shared` is added to `residual`; `joins` says which ones may be."""
    up, low, activation, up_bias, low_bias, weigh_inputs = experts
    assert routes.order_P is not None and routes.tiles is not None, "the pairs have no tiles"
    count, features, inner = low.shape
    (pairs,), (tokens, active) = routes.order_P.shape, routes.experts_TA.shape
    plain = isinstance(up, torch.Tensor) and isinstance(low, torch.Tensor)
    config = config or joint_config(routes.expected, count, inner, plain=plain)
    tensors, constants = stored_args(up, x_TD.dtype)
    low_tensors, low_constants = stored_args(low, x_TD.dtype)
    constants |= {f"{name}2": value for name, value in low_constants.items() if name != "WORDS"}
    tiles = most_tiles(pairs, count, config.pairs)
    places = routes.tiles.places if config.pairs == TILE_PAIRS else routes.starts_E1
    common = routes.weights_TA, routes.order_P, places, routes.tiles.counts
    inner_PI, out_PD = x_TD.new_empty(pairs, inner), x_TD.new_empty(pairs, features)
    wide, low_wide = _width(config.features, inner), _width(config.down_features, features)
    programs = tiles * (blocks(inner, wide) + blocks(features, low_wide))
    own: dict[str, int] = {"SHARED": 0, "SM": 16, "SN": 16, "SN2": 16, "SG": constants["G"], "SG2": constants["G2"]}
    shared_tensors, shared_TS, residual = (*tensors[:4], *low_tensors[:4]), inner_PI, out_PD
    if shared is not None and residual_TD is not None:
        (*first, _, _), given = stored_args(shared.gate_up_2SD, x_TD.dtype)
        (*second, _, _), low_given = stored_args(shared.down_DS, x_TD.dtype)
        wider, rows = shared.down_DS.shape[1], shared_rows(tokens, config)
        own = {
            "SHARED": wider,
            "SM": rows,
            "SN": _width(32, wider),
            "SN2": _width(64, features),
            "SG": given["G"],
            "SG2": low_given["G"],
        }
        shared_tensors, shared_TS, residual = (*first, *second), x_TD.new_empty(tokens, wider), residual_TD
        programs += blocks(tokens, rows) * (blocks(wider, own["SN"]) + blocks(features, own["SN2"]))
    _joint_kernel[(programs,)](
        x_TD, *tensors, x_TD if up_bias is None else up_bias, *low_tensors, x_TD if low_bias is None else low_bias, *shared_tensors,
        *common, inner_PI, out_PD, shared_TS, residual, residual.stride(0), active, tokens, activation.limit, tiles,
        E=count, D=features, INNER=inner, BE=padded(count), BM=config.pairs, BN=wide, BK=_depth(config.inputs, features),
        BN2=low_wide, BK2=_depth(config.down_inputs, inner), BIAS=up_bias is not None, BIAS2=low_bias is not None,
        KIND=kind_of(activation), WEIGH=weigh_inputs, num_warps=config.warps, num_stages=config.stages, ALL=routes.tiles.places.shape[1] // 2, **own, **constants,
        **dependent(x_TD.device),
    )  # fmt: skip
    return out_PD


def joins(shared: Shared, gate_up: torch.Tensor | Stored, down: torch.Tensor | Stored, dtype: torch.dtype) -> bool:
    """Whether `joint_products` may compute `shared` beside experts with these weights: both are stored alike."""
    return all(map(_alike, shared, (gate_up, down), (dtype, dtype)))


def _alike(one: torch.Tensor | Stored, experts: torch.Tensor | Stored, dtype: torch.dtype) -> bool:
    if not serves(one) or isinstance(one, torch.Tensor) != isinstance(experts, torch.Tensor):
        return False
    (codes, scales, zeros, *_), own = stored_args(one, dtype)
    (others, other_scales, other_zeros, *_), wanted = stored_args(experts, dtype)
    if own["SCALES"] == ROW_SCALES.value:  # whose groups are as long as the rows
        own["G"] = wanted["G"]
    tensors = zip((codes, scales, zeros), (others, other_scales, other_zeros), strict=True)
    return own == wanted and all(a.dtype == b.dtype for a, b in tensors)


def most_tiles(pairs: int, experts: int, size: int) -> int:
    """The largest number of tiles of so many pairs that there can be."""
    return min(pairs, pairs // size + min(experts, pairs))


def _width(wide: int, features: int) -> int:
    return min(wide, max(16, padded(features)))


def _depth(deep: int, inputs: int) -> int:
    return min(deep, max(32, padded(inputs)))
