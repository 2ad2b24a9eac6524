"""Kernels of attention to latents, chosen slots and windows, and of long rows, compiled as `helpers.compiled` says."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton.compiler import ASTSource

from helpers.compiling import gluon
from pagerunner.batch import StepRows
from pagerunner.ops.kernels.latent import indexer, indexer_gluon, sparse_latents, vectors_fp8_gluon, vectors_gluon
from pagerunner.ops.kernels.latent.latent_codes_gluon import ADDERS, codes_kernel
from pagerunner.ops.kernels.latent.latent_gluon import slices_kernel
from pagerunner.ops.kernels.latent.latent_pairs_gluon import pairs_kernel
from pagerunner.ops.kernels.latent.latent_wide import GROUPS, wide_tiles
from pagerunner.ops.kernels.latent.vectors_attention import CLUSTER, GLUON_TILES
from pagerunner.ops.kernels.paged.paged_prefill_gluon import PANEL, QUERIES, gluon_prefill_kernel


def _sparse(
    kernel: Any,
    narrow: str,
    fp8: bool,
    constants: dict[str, Any],
    tiles: Any,
    held: str,
    odd: tuple[str, ...] = (),
) -> dict[str, Any]:
    """A kernel of DeepSeek-V3.2's attention at its sizes. `narrow`: the type of queries, and of pages if they aren't `fp8`; `held` names these.

    `odd` strides aren't multiples of 16.
    """
    names = [name for name in kernel.arg_names if name not in constants]
    integers = ("chosen", "chosen_ptr", "row_ptr", "slots_ptr", "counter_ptr")
    types = dict.fromkeys(integers, "*i32") | dict.fromkeys(("position_ptr", "table", "table_ptr"), "*i64")
    types |= dict.fromkeys(("found", "weights_ptr", "scores_ptr"), "*fp32") | {"scale": "fp32"}
    if held == "codes":  # the other kernel has a number of parts
        types["parts"] = "*fp32"
    types |= {held: "*u8" if fp8 else "*" + narrow, "scales": "*fp32" if fp8 else "*" + narrow}
    types |= {"scales_ptr": types["scales"]}
    pointers = ("q_latent", "q_rope", "rope", "whole", "q_ptr")
    types = {name: type for name, type in (dict.fromkeys(pointers, "*" + narrow) | types).items() if name in names}
    strides = [name for name in names if name.endswith(("_token", "_head", "_page", "_slot", "_stride"))]
    aligned = [*(name for name, type in types.items() if type[0] == "*"), *strides]
    aligned = [name for name in aligned if name not in odd]
    constants |= {"FP8": tl.float8e4nv if fp8 else None, "PRECISION": "tf32x3" if narrow == "fp32" else "tf32"}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "launch_pdl": True}
    return gluon(kernel, types, {"PAGE": 64, "PDL": True} | constants, aligned, ASTSource, **options)


def chosen(narrow: str, heads: int, fp8: bool, split: bool) -> dict[str, Any]:
    """Attention to chosen latents, `ops/kernels/latent/sparse_latents.py`. A slot of 656 bytes has its rotary part and its scales at odd strides."""
    tiles = sparse_latents.chosen_tiles(heads, 4 if narrow == "fp32" else 2, fp8)
    constants = {"C": 512, "P": 64, "G": 4 if fp8 else 1, "BC": 512, "BP": 64, "SPLIT": split, "COMPILED": True}
    constants |= {"BH": tiles.heads, "BN": tiles.slots}
    odd = ("chosen_stride", *(("rope_slot", "scale_slot") if fp8 else ()))
    return _sparse(sparse_latents._chosen_kernel, narrow, fp8, constants, tiles, "codes", odd)


def codes() -> dict[str, Any]:
    """Slots in e4m3 and up to 16 queries, `ops/kernels/latent/latent_codes_gluon.py`."""
    types = dict.fromkeys(("q_latent", "q_rope", "rope", "whole"), "*bf16")
    types |= {"pages": "*u8", "table": "*i64", "scale": "fp32"} | dict.fromkeys(("parts", "found", "scales"), "*fp32")
    types |= dict.fromkeys(("chosen", "unit_ptr", "slice_ptr"), "*i32")
    aligned = [name for name, type in types.items() if type[0] == "*"]
    aligned += [name for name in codes_kernel.arg_names if name[:2] in ("qc", "qp", "wh") and "_" in name]
    constants = {"PAGE": 64, "C": 512, "PDL": True}
    return gluon(codes_kernel, types, constants, aligned, num_warps=ADDERS.value, launch_pdl=True)


def latents(name: str, queries: int, fp8: bool, chosen: bool, stride: int) -> dict[str, Any]:
    """Slices of attention in the latent space, `ops/kernels/latent/latent_gluon.py`, with a slot's parts at strides of 16 bytes."""
    sizes = {"PAGE": 64, "C": 512, "P": 64, "G": GROUPS if fp8 else 0, "H": wide_tiles(queries).heads}
    constants = sizes | {"CHOSEN": chosen, "STRIDE": stride, "PDL": True}
    types = dict.fromkeys(("q_latent", "q_rope", "pages", "rope", "whole"), "*" + name) | {"scale": "fp32"}
    types |= dict.fromkeys(("parts", "found", "scales"), "*fp32")
    types |= dict.fromkeys(("chosen", "unit_ptr", "slice_ptr", "row_ptr"), "*i32")
    types |= {"position_ptr": "*i64", "table": "*i64"} | ({"pages": "*u8"} if fp8 else {})
    aligned = [name for name, type in types.items() if type[0] == "*"]
    aligned += [name for name in slices_kernel.arg_names if name[:2] in ("qc", "qp", "wh") and "_" in name]
    return gluon(slices_kernel, types, constants, aligned, num_warps=wide_tiles(queries).warps, launch_pdl=True)


def pairs(name: str, page: int, stride: int) -> dict[str, Any]:
    """Those of 64 queries with two tiles at once, `ops/kernels/latent/latent_pairs_gluon.py`."""
    queries, slots = f"[1,64,64],{QUERIES.value!r}", f"[{min(page, 64)},64],{PANEL.value!r}"
    types = dict.fromkeys(("q_desc", "turned_desc"), f"tensordesc<{name}{queries}>")
    types |= dict.fromkeys(("page_desc", "rope_desc"), f"tensordesc<{name}{slots}>")
    pointers = {"whole": "*" + name, "parts": "*fp32", "found": "*fp32", "position_ptr": "*i64", "table": "*i64"}
    pointers |= dict.fromkeys(("unit_ptr", "slice_ptr", "row_ptr"), "*i32")
    constants = {"PAGE": page, "STRIDE": stride, "PDL": True}
    aligned = [*pointers, "whole_token", "whole_head"]
    return gluon(pairs_kernel, types | pointers | {"scale": "fp32"}, constants, aligned, num_warps=4, launch_pdl=True)


def scores(narrow: str, heads: int, fp8: bool, tokens: int) -> dict[str, Any]:
    """Scores of an indexer, `ops/kernels/latent/indexer.py`: 8 rows of so many tokens, or 64 of one."""
    count, tokens = (64, 1) if tokens == 64 else (8, tokens)
    rows = StepRows.of([tokens] * count, [5000] * count, range(count))
    dtype = torch.float8_e4m3fn if fp8 else {"fp32": torch.float32, "bf16": torch.bfloat16}[narrow]
    sizes = indexer.score_sizes(rows, count * tokens, heads, 5000, dtype)
    constants = {"J": heads, "D": 128, "BJ": heads, "BI": 128, "RATIO": 1, "TOP_K": 2048, "FP8_MAX": 448.0}
    constants |= {"BN": sizes.keys, "BQ": sizes.tokens, "ONE": rows.one_token}
    return _sparse(indexer._scores_kernel, narrow, fp8, constants, sizes, "keys_ptr")


def alone(name: str, heads: int, fp8: bool, chunk: int = 0) -> dict[str, Any]:
    """Scores of rows of one token, `ops/kernels/latent/indexer_gluon.py`, and their choice among `chunk` slots."""
    types = dict.fromkeys(("weights_ptr", "scores_ptr"), "*fp32") | {"q_ptr": "*" + name, "position_ptr": "*i64"}
    types |= dict.fromkeys(("row_ptr", "slots_ptr", "chosen_ptr", "counter_ptr"), "*i32") | {"table_ptr": "*i64"}
    types |= {"keys_ptr": "*u8" if fp8 else "*" + name, "scales_ptr": "*fp32" if fp8 else "*" + name}
    constants = {"J": heads, "D": 128, "BJ": heads, "PAGE": 16, "RATIO": 4, "TOP_K": 512, "FP8_MAX": 448.0, "PDL": True}
    constants |= {"FP8": tl.float8e4nv if fp8 else None, "C": chunk}
    strides = ("q_token", "q_head", "weights_token", "page_stride", "slot_stride", "table_stride", "scores_stride")
    return gluon(indexer_gluon.scores_kernel, types, constants, [*types, *strides], num_warps=4, launch_pdl=True)


def choice(narrow: str, heads: int, fp8: bool, chunk: int) -> dict[str, Any]:
    """Scores and choice in one launch, of DeepSeek-V4's slots of 4 tokens."""
    constants = {"J": heads, "D": 128, "BJ": heads, "BI": 128, "RATIO": 4, "TOP_K": 512, "FP8_MAX": 448.0}
    constants |= {"BN": indexer.FEW_KEYS, "C": chunk, "PAGE": 16}
    sizes = indexer.Sizes(1, 1, 1, indexer.FEW_KEYS, indexer.few_warps(chunk, fp8), 3)
    return _sparse(indexer._few_kernel, narrow, fp8, constants, sizes, "keys_ptr")


def best(several: bool) -> dict[str, Any]:
    """The best of a row's scores, or of what two kernels leave of a longer row."""
    types = dict.fromkeys(("chosen_ptr", "count_ptr", "row_ptr"), "*i32")
    types |= {"scores_ptr": "*fp32", "position_ptr": "*i64", "places_ptr": "*i16"}
    constants = {"S": 2048, "BH": 128 if several else 0, "X": 1024, "TOP_K": 512, "RATIO": 4}
    return gluon(
        indexer._best_kernel, types, constants | {"PDL": True}, list(types), ASTSource, num_warps=4, launch_pdl=True
    )


def scored(name: str, slots: int, fp8: bool) -> dict[str, Any]:
    """The same where a cluster chooses among so many slots, `ops/kernels/latent/vectors_choice_gluon.py`."""
    return vectors(name, 4, True, False, CLUSTER, fp8, slots)


def vectors(name: str, ratio: int, chosen: bool, new: bool, parts: int, fp8: bool = False, scored: int = 0) -> dict[str, Any]:  # fmt: skip
    """DeepSeek-V4's attention, `ops/kernels/latent/vectors_gluon.py`, and with pages in fp8 `vectors_fp8_gluon.py`."""
    kernel = vectors_fp8_gluon.vectors_kernel if fp8 else vectors_gluon.vectors_kernel
    names, numbers = (
        kernel.arg_names,
        ("q", "vectors", "window", "window_rope", "slot_pages", "rope", "cos", "sin", "out"),
    )
    types = (
        dict.fromkeys(numbers, "*" + name)
        | dict.fromkeys(("sinks", "parts", "found", "scored"), "*fp32")
        | {"scale": "fp32"}
    )
    types |= dict.fromkeys(("window_scales", "codes", "scales", *(["window"] if fp8 else [])), "*u8")
    types |= dict.fromkeys(("row_ptr", "start_ptr", "slots_ptr", "chosen_ptr"), "*i32")
    types |= dict.fromkeys(("position_ptr", "window_table", "slot_table"), "*i64")
    types = {one: type for one, type in types.items() if one in names}
    constants = {"WINDOW": 128, "RATIO": ratio, "PAGE": 16, "SLOT_PAGE": 1 if ratio == 128 else 16, "D": 512, "P": 64}
    cluster = CLUSTER if parts == CLUSTER else 1
    constants |= {
        "SPLIT": parts > cluster,
        "NEW": new,
        "CHOSEN": chosen,
        "TOP_K": 512 if scored else 0,
        "C": scored,
        "ONE": not new,
        "PDL": True,
    }
    strides = ["q_token", "q_head", "vector_stride", "scored_stride"]
    strides += [] if fp8 else ["window_stride", "window_slot", "page_stride", "page_slot"]
    aligned = [*(one for one, type in types.items() if type[0] == "*"), *strides]
    return gluon(kernel, types, constants, aligned, num_warps=GLUON_TILES.warps, num_ctas=cluster, launch_pdl=True)


def prefill(
    name: str,
    group: int,
    page: int,
    dim: int = 128,
    divided: bool = False,
    sinks: bool = False,
    reach: bool = False,
    softcap: bool = False,
) -> dict[str, Any]:
    """Long rows, `ops/kernels/paged/paged_prefill_gluon.py`, of heads in such groups. `page` 0: new tokens alone."""
    tiles, queries = (
        f"[{128 if dim <= 128 else 64},64],{PANEL.value!r}",
        f"[{64 // group},{group},64],{QUERIES.value!r}",
    )
    types = dict.fromkeys(("k_desc", "v_desc"), f"tensordesc<{name}{tiles}>")
    boxes = queries if group & (group - 1) == 0 else tiles
    types |= dict.fromkeys(("q_desc", "out_desc"), f"tensordesc<{name}{boxes}>")
    pages = f"[{min(page & -page or 128, 128 if dim <= 128 else 64)},64],{PANEL.value!r}"
    types |= dict.fromkeys(("kp_desc", "vp_desc"), f"tensordesc<{name}{pages}>") | {
        "table_ptr": "*i64",
        "scale": "fp32",
        "softcap": "fp32",
    }
    pointers = ["slots_ptr", "starts_ptr", "lengths_ptr", "part_ptr", "taken_ptr"]
    types |= (
        dict.fromkeys(pointers, "*i32")
        | dict.fromkeys(("values_ptr", "sums_ptr"), "*fp32")
        | dict.fromkeys(("q_ptr", "out_ptr", "sinks_ptr"), "*" + name)
    )
    constants = {
        "G": group,
        "D": dim,
        "PAGE": page or 128,
        "PAGED": page > 0,
        "DIVIDED": divided,
        "SINKS": sinks,
        "SOFTCAP": softcap,
        "REACH": reach,
        "PDL": True,
    }
    aligned = [
        "q_ptr",
        "q_st",
        "q_sh",
        "out_ptr",
        "out_st",
        "out_sh",
        "table_ptr",
        "table_st",
        "values_ptr",
        "sums_ptr",
        *pointers,
    ]
    return gluon(gluon_prefill_kernel, types, constants, aligned, num_warps=4, launch_pdl=True)
