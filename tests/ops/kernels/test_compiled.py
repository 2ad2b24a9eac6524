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
from pagerunner.ops.kernels.linear_parts import halves
from pagerunner.ops.kernels.linear_wide import WideConfig, stages_of

ROOT = Path(__file__).parents[3]
ROOM = 227 * 1024

PRODUCTS = [("many", "bf16", True, 0, False), ("many", "fp16", False, 0, False), ("many", "bf16", True, 2, True)]
MANY = [PRODUCTS[number] for number in share_of_the_day(3, 3)]
ROUNDING = [("rounding", 1), ("rounding", 2), ("rounding", 64)]
SHAPES = [(2880, 2880), (2048, 768), (608, 352)]  # of experts in MXFP4: features, inner features


def lanes_cases() -> list[tuple[Any, ...]]:
    """One shape a day: its second product, and its first with one of the two gates. After six days all have had their turn."""
    chosen = [(SHAPES[number % 3], 2 * (number % 2)) for number in share_of_the_day(6, 6)]
    cases = [
        case
        for shape, gate in chosen
        for case in (("arrange", shape[0]), ("lanes", *shape, gate, True), ("lanes", *shape, 0, False))
    ]
    return list(dict.fromkeys(cases))


def streams_cases() -> list[tuple[Any, ...]]:
    """One shape, the least of them too, tile and product every third day: each takes ten seconds. After 54 days all have had their turn."""
    products = (0, True), (2, True), (0, False)
    shapes = *SHAPES[:2], (224, 128)
    cases = [
        ("streams", *shape, each, *product) for shape, each, product in itertools.product(shapes, (40, 100), products)
    ]
    turns = 3 * len(cases)
    return [cases[number // 3] for number in share_of_the_day(turns, turns) if number % 3 == 0]


def wide_cases() -> list[tuple[Any, ...]]:
    """One of all kernels that products launch, by dtype, tokens, groups, zero points, and whether there are parts. Another one each day."""
    cases = [
        (
            "wide",
            name,
            *halves(size),
            groups,
            stages_of(WideConfig(size, groups, 1), 32, zeros, ROOM),
            zeros,
            groups == 3,
        )
        for name, size, groups, zeros in itertools.product(
            ("bf16", "fp16"), (32, 64, 96, 128, 160, 192), (2, 3), (False, True)
        )
    ]
    return [cases[number] for number in share_of_the_day(len(cases), len(cases))]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], dict[str, Any]]:
    """What was found about each case."""
    cases = [*MANY, *ROUNDING, *lanes_cases(), *streams_cases(), *wide_cases()]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests"), str(ROOT / "scripts"), env.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "helpers.compiled", json.dumps(cases)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=1200)
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


def spilled(said: str) -> int:
    """How many bytes of registers a kernel stores for want of registers."""
    return int(re.search("([0-9]+) bytes spill stores", said)[1])


@pytest.mark.parametrize("case", MANY, ids=str)
def test_grouped_products_stay_on_their_way(case, compiled):
    """ptxas says so (C75xx) when it runs products one by one; nothing else would show it."""
    found = compiled[case]
    assert "error" not in found, found["error"]
    assert not re.search("C75[0-9][0-9]", found["said"]), found["said"]
    assert spilled(found["said"]) == 0, found["said"]
    assert found["faults"] == []


@pytest.mark.parametrize("case", [*wide_cases(), *streams_cases()], ids=str)
def test_products_of_wide_tiles_and_streams_of_experts_stay_on_their_way(case, compiled):
    """Some keep up to 64 bytes for want of registers: 192 tokens with zero points, and streams with 128 pairs a tile."""
    found = compiled[case]
    assert "error" not in found, found["error"]
    assert not re.search("C75[0-9][0-9]", found["said"]), found["said"]
    assert spilled(found["said"]) <= 64, found["said"]
    assert found["faults"] == []


@pytest.mark.parametrize("case", lanes_cases(), ids=str)
def test_kernels_of_lanes_are_compiled_without_faults(case, compiled):
    found = compiled[case]
    assert "error" not in found, found["error"]
    assert found["faults"] == []
    assert spilled(found["said"]) == 0, found["said"]
    assert found["copies"] or case[0] == "arrange", "a copy brings 16 bytes for each lane"


@pytest.mark.parametrize("case", ROUNDING, ids=str)
def test_numbers_are_rounded_in_pairs_or_alone(case, compiled):
    """The interpreter doesn't know PTX."""
    assert "error" not in compiled[case], compiled[case]["error"]
