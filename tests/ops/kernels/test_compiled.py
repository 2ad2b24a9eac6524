"""What can't be interpreted is compiled, for a card that isn't there: kernels in Gluon, and PTX. `tests/gpu` runs the kernels."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.effort import share_of_the_day
from pagerunner.attention.paged_sparse import SHARED_MEMORY
from pagerunner.ops.kernels.latent.vectors_attention import CLUSTER
from pagerunner.ops.kernels.linear.linear_wide import SIZES
from pagerunner.ops.kernels.lora.lora import EXPAND_WARPS, SHRINK_WARPS, expand_warps

ROOT = Path(__file__).parents[3]
ROOM = 227 * 1024

PRODUCTS = [
    *(("many", "bf16", True, 0, False), ("many", "fp16", False, 0, False), ("many", "bf16", True, 2, True)),
    *(("many", "fp8e4nv", True, 0, False), ("many", "fp8e4nv", False, 0, True)),
]
ROUNDING = [("rounding", 1), ("rounding", 2), ("rounding", 64)]
ADAPTERS = [
    ("adapters", "shrink", 512),
    ("adapters", "expand", 128),
    ("adapters", "expand", 512),
]
BESIDE = [("beside", "shrink"), ("beside", "expand")]
SUMS = ("beside", "sums")
FIXED = [("fixed", 4, 128, *flags) for flags in ((2048, False, False), (8, False, True), (0, False, False))]
FIXED += [("fixed", 2, 64, 0, True, False)]
ADAPTED_ROWS = [
    ("adapted_row", 4096, (4096, 1024, 1024), False),
    ("adapted_row", 12288, (4096,), False),
    ("adapted_row", 4096, (12288, 12288), True),
    ("adapted_row", 4096, (3072, 3072), True),
]
ADAPTERS, ADAPTED_ROWS = ([one[at] for at in share_of_the_day(len(one), len(one))] for one in (ADAPTERS, ADAPTED_ROWS))
ROUTES = [("route", 16, 1, 8), ("route", 8, 1, 24)]
"""With one expert of a token (Llama 4) Triton 3.6 couldn't compile what its layouts made of a mask of the pairs that are stored."""
SHAPES = [(2880, 2880), (2048, 768), (608, 352)]  # of experts in 4 bits: features, inner features
FORMS = ["mxfp4", "nvfp4", "int4"]  # few pairs of int4 have other kernels


SORTS = 6


def turns(cases: list[Any], day: int) -> list[Any]:
    """One of the cases every sixth day: most take one to five seconds. After 6 * len(cases) days all have had their turn."""
    assert 0 <= day < SORTS, "on no day it would be the turn of these"
    days = SORTS * len(cases)
    return [cases[number // SORTS] for number in share_of_the_day(days, days) if number % SORTS == day]


def turns_of_two(cases: list[Any], days: tuple[int, int]) -> list[Any]:
    """One of the cases on each of two days of the six, where they are many."""
    return [case for half, day in enumerate(days) for case in turns(cases[half::2], day)]


def lanes_cases() -> list[tuple[Any, ...]]:
    """One shape: its second product, and its first with one of the two gates; codes in one of their forms."""
    shapes = [(SHAPES[number % 3], 2 * (number % 2), FORMS[(number + number // 3) % 2]) for number in range(6)]
    cases = [
        case
        for shape, gate, form in turns(shapes, 1)
        for case in (("arrange", shape[0]), ("lanes", *shape, gate, True, form), ("lanes", *shape, 0, False, form))
    ]
    return list(dict.fromkeys(cases))


def streams_cases() -> list[tuple[Any, ...]]:
    """One shape, the least of them too, tile, product and form."""
    products = (0, True), (2, True), (0, False)
    shapes = *SHAPES[:2], (224, 128)
    cases = [
        ("streams", *shape, each, *product, FORMS[number % 4 % 3])
        for number, (shape, each, product) in enumerate(itertools.product(shapes, (40, 100), products))
    ]
    return turns(cases, 3)


def wide_cases() -> list[tuple[Any, ...]]:
    """One of all kernels that products launch, by dtype, form, tokens and groups; and one of rounded inputs, by dtype, tokens, groups, kind of scales, and whether there are parts."""
    forms = [
        (name, form)
        for name in ("bf16", "fp16")
        for form in (
            "int4 f16 128",
            "int4 f16 128 zeros",
            "int4 f16 32",
            "int4 f16 64 zeros",
            "fp8 row",
            "fp8 block",
            "int8 group 128",
            "int8 group 32",
        )
    ]
    forms += [("bf16", "e2m1 e8m0 32"), ("bf16", "e2m1 e4m3 16 rows")]
    sizes = itertools.product(SIZES, (2, 3))
    wide = [
        ("wide", *form, *size)
        for size in sizes
        for form in forms
        if "8" not in form[1][:4] or size[1] == 2 or size[0] <= 160
    ]
    eight = itertools.product(("fp8e4nv", "i8"), (16, 64, 96, 160, 192), (1, 2, 3), (False, True), (False, True))
    return [*turns_of_two(wide, (2, 4)), *turns([("eight", *one) for one in eight if one[1] <= 160 or one[2] < 3], 1)]


def few_cases() -> list[tuple[Any, ...]]:
    """Query heads of a head of keys, and a head's size; whether the schedule is read early; norms; parts of the projection."""
    shapes = (16, 128), (12, 80), (16, 64), (16, 256), (8, 128)
    whole = [("few", *shape, early, not early) for shape, early in itertools.product(shapes, (False, True))]
    return turns([*whole, ("few", 4, 128, True, True, 4), ("few", 8, 64, True, False, 3)], 0)


def few_drafts_cases() -> list[tuple[Any, ...]]:
    """Query heads of a head of keys, tokens of a row, a head's size; whether the schedule is read early; norms."""
    shapes = (4, 4, 128), (4, 8, 128), (8, 4, 64), (2, 8, 256)
    return turns([("few_drafts", *shape, early, not early) for shape in shapes for early in (False, True)], 2)


def drafts_cases() -> list[tuple[Any, ...]]:
    """Query heads of a head of keys, tokens of a row, a head's size; fp8 pages; few rows."""
    shapes = (4, 4, 128), (4, 8, 128), (8, 8, 128), (8, 4, 64)
    return turns(
        [("drafts", *shape, *kind) for shape in shapes for kind in itertools.product((False, True), repeat=2)], 1
    )


def recurrence_cases() -> list[tuple[Any, ...]]:
    """Layers with states, by the states' dtype and the entries of a journal."""
    kinds = itertools.product(("gdn", "mamba2", "conv"), ("fp32", "bf16"), (0, 3, 7))
    return turns([("recurrence", *kind) for kind in kinds], 0)


ONES = list(itertools.product(("recurrence",), ("one gdn", "one mamba2", "one conv"), ("fp32", "bf16"), (0,)))
"""Those of one token a row."""
ONES = [ONES[number] for number in share_of_the_day(6, 6)]


def dense_cases() -> list[tuple[Any, ...]]:
    """One of all kernels of dense products, by tokens, groups, and whether there are parts."""
    sizes = itertools.product((8, 16, 32, 64, 128), (1, 2, 3), (False, True))
    cases = [("dense", "fp16" if size == 16 else "bf16", size, *more) for size, *more in sizes]
    gates = [("dense", "bf16", 64, 3, True, 0, False, count) for count in (3072, 6144, 12_288)]
    return turns_of_two([*cases, *gates], (5, 1))


def latent_cases() -> list[tuple[Any, ...]]:
    """Slices of attention in the latent space, by queries, and by what a unit's keys are: of pages, or chosen, in fp8 or not."""
    kinds = (False, False, 1), (False, False, 4), (False, True, 1)
    cases = [("latents", "bf16", queries, *kind) for queries in (16, 64) for kind in kinds]
    return turns([*cases, ("codes",), ("latents", "bf16", 64, True, True, 1)], 3)


def sparse_cases() -> list[tuple[Any, ...]]:
    """Some of attention to chosen latents and one of an indexer's scores, by dtype, heads, whether pages are fp8, and whether slots are
    divided among programs, or tokens of a row (64: of 64 rows); and one of scores and choice in one launch, by the slots that are chosen from.
    """
    chosen = itertools.product(["chosen"], ("bf16", "fp32"), (16, 32, 128), (False, True), (True, False))
    scores = itertools.product(["scores"], ("bf16", "fp32"), (64, 128), (False, True), (1, 4, 64))
    choice = [("choice", "bf16", 64, fp8, chunk) for fp8 in (False, True) for chunk in (1024, 8192)]
    return [*turns_of_two(list(chosen), (3, 0)), *turns(list(scores), 3), *turns(choice, 3)]


def vectors_cases() -> list[tuple[Any, ...]]:
    """Layers of windows alone, of chosen slots and of all, by whether rows have several tokens, parts, and pages in fp8."""
    layers = (0, False, False), (4, True, False), (128, False, False), (4, True, True), (128, False, True)
    cases = [("vectors", "bf16", *layer, parts == 1, parts, fp8) for *layer, fp8 in layers for parts in (1, 2, 3)]
    return turns(cases, 4)


def prefill_cases() -> list[tuple[Any, ...]]:
    """Long rows, by query heads of a head of keys, tokens of a page (0: new tokens alone), a head's size, and whether blocks are divided, there are sinks, windows, and soft caps."""
    cases = [
        ("prefill", "bf16", 4, 16),
        ("prefill", "bf16", 5, 16),
        ("prefill", "bf16", 4, 0),
        ("prefill", "fp16", 8, 64),
    ]
    cases += [("prefill", "bf16", 4, 16, 64), ("prefill", "fp16", 7, 16, 80), ("prefill", "bf16", 4, 16, 128, True)]
    cases += [("prefill", "bf16", 8, 16, 256), ("prefill", "bf16", 6, 128, 256, True)]
    cases += [
        ("prefill", "bf16", 2, 16, 256, False, False, True),
        ("prefill", "bf16", 8, 64, 64, True, True, True),
        ("prefill", "bf16", 2, 16, 256, False, False, True, True),
    ]
    return turns([*cases, ("prefill", "fp16", 3, 0)], 0)


def pairs_cases() -> list[tuple[Any, ...]]:
    """Slices of 64 queries with two tiles at once, by slots of a page and tokens of a row."""
    return turns([("pairs", "bf16", 64, 1), ("pairs", "fp16", 16, 4), ("pairs", "bf16", 128, 2)], 4)


SPARSE, LATENTS, VECTORS = sparse_cases(), latent_cases(), vectors_cases()
SUMMED = turns([False, True], 5)  # indexer keys in fp8
SCORED = [("scored", "bf16", 1024, fp8) for fp8 in SUMMED]
"""Attention that chooses slots itself."""
ALONE = [("alone", "bf16", 64, fp8, chunk) for fp8 in SUMMED for chunk in (0, 4096)]
"""Scores of rows of one token, and their choice among so many."""
BEST = turns([False, True], 4)
HELD = turns([("held", "bf16", 6144, 4096, 1, False), ("held", "fp16", 4096, 4096, 0, False), ("held", "bf16", 6144, 1024, 2, True), ("held", "bf16", 1024, 2048, 0, True)], 5)  # fmt: skip
PEERS = [
    ("peers", "peer_words", 3),
    ("peers", "peer_units", 3),
    ("peers", "peer_bare", 3),
    ("peers", "peer_bare_token", 2),
    ("peers", "peer_bare_token", 2, 4),
    ("peers", "peer_bare_token", 2, 0, 8),
    ("peers", "peer_bare_twice", 4),
    ("peers", "peer_bare_twice", 4, 4),
]
PEERS = [PEERS[number] for number in share_of_the_day(len(PEERS), 3)]
CASES = [
    *PEERS,
    *turns(PRODUCTS, 2),
    *dense_cases(),
    *HELD,
    *lanes_cases(),
    *streams_cases(),
    *wide_cases(),
    *few_cases(),
    *drafts_cases(),
    *few_drafts_cases(),
    *turns(FIXED, 1),
    *recurrence_cases(),
    *ONES,
    *ADAPTERS,
    *BESIDE,
    SUMS,
    *ADAPTED_ROWS,
    *VECTORS,
    *SCORED,
    *ALONE,
    *LATENTS,
    *prefill_cases(),
    *pairs_cases(),
    *ROUTES,
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], dict[str, Any]]:
    """What was found about each case."""
    scores = [("scores", "bf16", 64, fp8, tokens) for fp8 in SUMMED for tokens in (1, 4, 64)]
    scores += [("choice", "bf16", 64, fp8, 1024) for fp8 in SUMMED] + [("best", several) for several in BEST]
    cases = [*CASES, *ROUNDING, *SPARSE, *(case for case in scores if case not in SPARSE)]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests"), str(ROOT / "scripts"), env.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "helpers.compiled", json.dumps(cases)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=1200)
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


def spilled(said: str) -> int:
    """How many bytes of registers a kernel stores for want of registers."""
    return int(re.search("([0-9]+) bytes spill stores", said)[1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_stay_on_their_way(case, compiled):
    """ptxas says so (C75xx) when it runs products one by one; nothing else would show it.

    Some keep bytes for want of registers, up to 64: products of few tokens, one row with adapters, and streams with 128 pairs a tile. Wide tiles of 192 tokens keep up to 112. Of drafts, 64 queries with
    fp8 pages keep up to 96. Attention in a fixed order, with two results in registers, up to 150. Few rows with more
    than 8 heads of 256 numbers keep up to 700. Latents with 64 queries, and vectors with pages in fp8, keep up to 128, two tiles of latents at
    once up to 200, long rows up to 80, and in groups that are no powers of two up to 160.
    """
    found = compiled[case]
    assert "error" not in found, found["error"]
    assert not re.search("C75[0-9][0-9]", found["said"]), found["said"]
    most = (
        700
        if case[0] == "few" and case[1] > 8 and case[2] == 256
        else 150
        if case[0] == "fixed"
        else 200
        if case[0] == "pairs"
        else 96
        if case[0] == "drafts" and case[1] * case[2] == 64 and case[4]
        else 112
        if case[0] == "wide" and case[3] == 192
        else 64
        if case[0] in ("wide", "streams", "drafts", "held", "adapted_row")
        else 128
        if (case[0] == "latents" and case[2] > 16) or (case[0] in ("vectors", "scored") and case[-1])
        else 400 * case[7]
        if case[0] == "prefill" and len(case) > 6  # of windows, beside the loops
        else 80 + 80 * (case[2] % 2)  # lanes copy queries of such groups
        if case[0] == "prefill"
        else 0
    )
    assert spilled(found["said"]) <= most, found["said"]
    assert found["faults"] == []
    assert case[0] not in ("lanes", "vectors", "scored", "alone", "latents") or found["copies"], (
        "a copy brings 16 bytes for each lane"
    )


@pytest.mark.parametrize("case", [*SCORED, *(case for case in VECTORS if case[-2] == CLUSTER)], ids=str)
def test_nothing_else_is_in_shared_memory_while_programs_of_a_cluster_write_to_each_others(case, compiled):
    """A thread gives away 64 sums of 16 bits and two numbers of a head. The compiler doesn't know where they lie, and would take the room for a conversion of its own."""
    steps, met = compiled[case]["swapped"], ["barrier.cluster.arrive", "barrier.cluster.wait"]
    store = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
    given = [f"{store}.v4.b32"] * 8 + [f"{store}.v2.f32"]
    taken = ["mbarrier.try_wait", *["ld.shared.v4.b32"] * 8, "ld.shared.v2.f32", "bar.sync"]
    assert steps[: len(met + given + taken)] == met + given + taken


@pytest.mark.parametrize("case", SCORED, ids=str)
def test_chosen_numbers_lie_where_keys_of_attention_will(case, compiled):
    """They are written to the first of shared memory, and the window's tile is in the second half of the room for keys meanwhile."""
    found = compiled[case]["allocated"]
    assert found["2x64x512xbf16"] == 0 and sorted(found.values())[1] == 2 * 64 * 512 * 2


@pytest.mark.parametrize(
    "case", [*(case for case in LATENTS if case[0] == "latents"), *VECTORS, *SCORED, *ALONE], ids=str
)
def test_what_other_warps_have_copied_is_read_when_all_have_waited_for_it(case, compiled):
    """A warp waits for its own copies. Latents leave the rest to the compiler."""
    copied = compiled[case]["copied"]
    behind = [copied[at + 1] for at, what in enumerate(copied[:-1]) if what == "cp.async.wait_group"]
    assert behind and set(behind) == {"bar.sync"}


@pytest.mark.parametrize("case", [*SPARSE, *LATENTS], ids=str)
def test_attention_to_what_an_indexer_chooses_takes_no_more_shared_memory_than_is_declared(case, compiled):
    """Its kernels run in the interpreter, which has as much as is asked for."""
    found = compiled[case]
    assert "error" not in found, found["error"]
    assert found["faults"] == []
    assert found["shared"] <= SHARED_MEMORY[case[1:2] == ("fp32",)] <= ROOM


@pytest.mark.parametrize("fp8", SUMMED)
def test_a_score_is_the_same_sum_of_heads_in_decode_and_in_prompts(fp8, compiled):
    """Two slots whose scores are almost equal are chosen alike then. A program of one token has 64 queries, of a prompt 256."""
    found = [compiled["scores", "bf16", 64, fp8, tokens] for tokens in (1, 4, 64)]
    found += [compiled[case] for case in (("choice", "bf16", 64, fp8, 1024), *ALONE) if case[3] == fp8]
    assert not any("error" in one for one in found)
    assert all(one["sums"] == [[[1, 8, 16, 32], [2, 4]]] for one in found)


@pytest.mark.parametrize(
    "case",
    [*(("choice", "bf16", 64, fp8, 1024) for fp8 in SUMMED), *(("best", several) for several in BEST), *ALONE],
    ids=str,
)
def test_attention_may_begin_when_all_before_the_choice_is_complete(case, compiled):
    """It reads queries and windows before its turn (`Slots.early`), so what chooses has its own turn before it starts attention."""
    steps = compiled[case]["steps"]
    assert steps[:2] == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]


@pytest.mark.parametrize("case", ONES, ids=str)
def test_states_of_one_token_are_read_before_the_turn_and_the_convolution_has_its_own_before_it_starts_them(
    case, compiled
):
    """In full words. What is read early has been written by kernels before the convolution."""
    found = compiled[case]
    assert "error" not in found, found["error"]
    steps = found["steps"]
    turn = steps.index("griddepcontrol.wait")
    assert steps[turn : turn + 2] == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]
    words = 64 * 128 * (4 if case[2] == "fp32" else 2) // 16 // 32 // (4 if "gdn" in case[1] else 8)
    assert steps[:turn].count("ld.global.v4.b32") == (0 if "conv" in case[1] else words)
    assert not any(step.startswith(("st", "atom")) for step in steps[:turn])


@pytest.mark.parametrize("case", HELD, ids=str)
def test_weights_are_asked_for_before_the_turn_in_full_words(case, compiled):
    """A thread has 16 numbers of each of two rows a step: four loads of 16 bytes. If a program has 8 features, the second row is masked."""
    found = compiled[case]
    assert "error" not in found, found["error"]
    before = found["steps"][: found["steps"].index("griddepcontrol.wait")]
    loads = [step for step in before if step == "ld.global.v4.b32"]
    assert len(loads) == found["early"] * (2 if case[-1] else 1) * 4


@pytest.mark.parametrize("case", ADAPTERS, ids=str)
def test_adapters_are_read_before_the_turn_and_sums_at_once(case, compiled):
    """Numbers in words of 16 bytes. What the first kernel has left of eight pieces is asked for without anything between.

    Four warps of the first kernel have 512 features of 16 ranks: 16 KB, so a thread loads eight words of 16 bytes.
    """
    found = compiled[case]
    assert "error" not in found, found["error"]
    turn = found["steps"].index("griddepcontrol.wait")
    before, behind = found["steps"][:turn], found["steps"][turn + 1 :]
    assert not any(".b16" in step for step in found["steps"])
    _, name, features = case
    if name == "shrink":
        assert before.count("ld.global.v4.b32") == 8 and found["shared"] == 8192
    else:
        wide = features // 128
        assert before[0] == "griddepcontrol.launch_dependents" and before.count(
            "ld.global.v4.b32"
        ) == 4 * wide * 4 // expand_warps(features)
        assert len(set(behind[:8])) == 1 and behind[0].startswith("ld.global")


@pytest.mark.parametrize("case", BESIDE, ids=str)
def test_adapters_beside_a_product_go_straight_to_matrix_units(case, compiled):
    """Numbers come in words of 16 bytes. Warps meet for the sum of theirs of `A x` alone."""
    found, shrinks = compiled[case], case[1] == "shrink"
    assert "error" not in found, found["error"]
    steps = found["steps"]
    assert found["shared"] == 512 * SHRINK_WARPS * shrinks and ("bar.sync" in found["copied"]) == shrinks, (
        "it runs beside a product"
    )
    assert not any(".b16" in step for step in steps) and steps[0] == "griddepcontrol.launch_dependents"
    before = steps[: steps.index("griddepcontrol.wait")]
    assert before.count("ld.global.v4.b32") == (96 // SHRINK_WARPS if shrinks else 32 // EXPAND_WARPS)
    assert steps[-1] == "griddepcontrol.wait" or not shrinks, "it may run before the product has ended"


def test_programs_that_add_up_sums_beside_adapters_ask_for_all_parts_at_once(compiled):
    """Eight numbers of each of four parts, and of the output to which they are added."""
    found = compiled[SUMS]
    assert "error" not in found, found["error"]
    steps = found["steps"]
    turns = [at + 1 for at, step in enumerate(steps) if step == "griddepcontrol.wait"]
    assert any(steps[at : at + 9] == ["ld.global.v4.b32"] * 9 for at in turns)


@pytest.mark.parametrize("case", ADAPTED_ROWS, ids=str)
def test_a_thread_of_one_row_loads_its_share_of_the_adapter(case, compiled):
    """Once: with the layout of the product's own sums every thread would load 32 of B's numbers, and fewer programs would fit. And behind its turn, or the
    machine's compiler puts them, with what they wait for, in front of the weights.
    """
    found = compiled[case]
    assert "error" not in found, found["error"]
    steps = found["steps"][found["steps"].index("st.global.b64") :]  # behind what the first programs do
    turn = steps.index("griddepcontrol.wait")
    before, behind = steps[:turn], steps[turn + 1 :]
    assert before.count("ld.global.b64") == (2 if case[-1] else 1) and "ld.global.b16" not in before
    assert behind.count("ld.global.b16") == (2 if case[-1] else 4)
    words = behind.index("ld.volatile.global.b64")
    assert "bar.sync" not in behind[:words], "words that are there at once aren't waited for"


@pytest.mark.parametrize("case", PEERS, ids=str)
def test_ranks_tell_behind_their_numbers_and_take_behind_what_is_told(case, compiled):
    """What no interpreter shows, as there a program is one thread whose stores are seen in their order."""
    _, name, ranks, *_ = case
    steps: list[str] = compiled[case]["steps"]
    early = steps[: steps.index("griddepcontrol.wait")]
    rooms = ["ld.global.b64"] * ranks
    read_early = {
        "peer_units": ["ld.global.b64"] * 2 + ["ld.global.v4.b32"] * 2,
        "peer_bare": rooms,
        "peer_bare_token": [*rooms, *["ld.global.v4.b32"] * 2],
        "peer_bare_twice": [*rooms, *["ld.global.v4.b32"] * 2],
    }
    assert early == ["griddepcontrol.launch_dependents", *read_early.get(name, ["ld.global.b64"])], (
        "addresses and a norm's weight"
    )
    if name == "peer_words":
        sent = [place for place, step in enumerate(steps) if step == "st.global.v2.b64"]
        taken = [place for place, step in enumerate(steps) if step == "ld.volatile.global.v2.b64"]
        assert sent and len(taken) >= ranks and max(sent) < min(taken), (
            "no rank waits for words before it has sent its own"
        )
        behind = steps[steps.index("st.global.v4.b32") + 1]
        assert behind == "bar.sync", "no thread sends the next round's words before all have this one's"
        return
    if name.startswith("peer_bare"):
        looked = f"ld.volatile.global.v{2 if name == 'peer_bare_twice' else 4}.b32"
        first = steps.index(looked)
        assert sum(step.startswith("st.global.v") for step in steps[:first]) >= ranks - 1, (
            "no rank looks before it has sent its own"
        )
        assert steps[first : first + ranks] == [looked] * ranks, "all ranks' words are asked for at once"
        paths = "; ".join(compiled[case]["paths"])
        if name == "peer_bare_token":
            assert "fence" not in paths, "a token has fewer rounds than there are places"
            return
        between = r"; bra (\$L\w+); fence\.acq_rel\.sys; bar\.sync; bra\.uni \$L\w+; \1; ret$"
        if name == "peer_bare_twice":  # with four places two of three rounds go around it, too, to the barrier
            between = r"; (\$L\w+); bar\.sync; .*; bra (\$L\w+); bra \1; fence\.acq_rel\.sys; bra\.uni \1; \2; ret$"
        assert re.search(between, paths) and paths.count("fence") == 1, "a last round goes around the fence"
        return
    told = [place for place, step in enumerate(steps) if step.startswith("atom.")]
    assert len(told) == 1
    assert steps[told[0] - 2 : told[0] + 1] == ["st.global.v4.b32", "bar.sync", "atom.global.sys.release.exch.b32"]
    assert steps.count("ld.acquire.sys.global.b32") == ranks
    assert min(place for place, step in enumerate(steps) if ".acquire" in step or ".cg" in step) > told[0]


@pytest.mark.parametrize("case", ROUNDING, ids=str)
def test_numbers_are_rounded_in_pairs_or_alone(case, compiled):
    """The interpreter doesn't know PTX."""
    assert "error" not in compiled[case], compiled[case]["error"]
