"""What `scripts/check_compiled.py` finds in instructions that a compiler wrote."""

from __future__ import annotations

import importlib.util

import pytest

from project.checks import ROOT

pytest.importorskip("triton")
SET = "        /*0010*/                   R2UR UR24, R2 ;                    /* 0x0000 */\n"
PAIR = "        /*0020*/              @!P0 UIADD3.64 UR26, UR24, 0x2, URZ ;   /* 0x0000 */\n"
NEXT = "        /*0030*/                   UMOV UR25, 0x40000040 ;            /* 0x0000 */\n"
ALL = "        /*0040*/                   HGMMA.64x32x16.F32.BF16 R40, gdesc[UR24].tnspB, RZ, !UPT ;\n"
B_ONLY = "        /*0040*/                   HGMMA.64x32x16.F32.BF16 R40, R24, gdesc[UR24].tnspB, R40 ;\n"


@pytest.fixture
def unwritten():
    spec = importlib.util.spec_from_file_location("check_compiled", ROOT / "scripts" / "check_compiled.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda text: [found.rsplit("(", 1)[1] for found in module.unwritten(text)]


@pytest.mark.parametrize(
    ("text", "registers"),
    [
        (SET + NEXT + PAIR + ALL, []),
        (SET + PAIR + ALL, ["UR25)"]),
        (SET + PAIR + B_ONLY, []),
        (SET + NEXT + B_ONLY, ["UR26)", "UR27)"]),
        ("        /*1000*/                   UIADD3 UR38, UP0, UR38, 0x40, URZ ;\n" * 2, ["UR38)"]),
        ("        /*1000*/                   LDG.E R4, desc[UR6][R2.64+0x4] ;\n", ["UR6)", "UR7)"]),
        ("        /*1000*/                   ULDC.64 UR6, c[0x0][0x208] ;\n" + SET.replace("R2UR UR24, R2", "UMOV UR4, UR7"), []),
    ],
)  # fmt: skip
def test_registers_that_nothing_wrote(unwritten, text, registers):
    assert unwritten(text) == registers
