"""What `scripts/check_compiled.py` finds in instructions that a compiler wrote."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from project.checks import ROOT

pytest.importorskip("triton")
SET = "        /*0010*/                   R2UR UR24, R2 ;                    /* 0x0000 */\n"
PAIR = "        /*0020*/              @!P0 UIADD3.64 UR26, UR24, 0x2, URZ ;   /* 0x0000 */\n"
NEXT = "        /*0030*/                   UMOV UR25, 0x40000040 ;            /* 0x0000 */\n"
ALL = "        /*0040*/                   HGMMA.64x32x16.F32.BF16 R40, gdesc[UR24].tnspB, RZ, !UPT ;\n"
B_ONLY = "        /*0040*/                   HGMMA.64x32x16.F32.BF16 R40, R24, gdesc[UR24].tnspB, R40 ;\n"
ZERO = "        /*0010*/                   IMAD.MOV.U32 R44, RZ, RZ, RZ ;\n"
UPPER = "        /*0020*/                   IADD3.X R36, R44, -0x7fffffe0, RZ, P1, !PT ;\n"
LOADED = "        /*0018*/               @P0 LDG.E.64 R44, desc[UR60][R2.64] ;\n"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("check_compiled", ROOT / "scripts" / "check_compiled.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def faults(script):
    return lambda text: [found.split(":")[0] for found in script.faults(text)]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (SET + NEXT + PAIR + ALL, []),
        (SET + PAIR + ALL, ["0040"]),
        (SET + PAIR + B_ONLY, []),
        (SET + NEXT + B_ONLY, ["0040"]),
        ("        /*1000*/                   UIADD3 UR38, UP0, UR38, 0x40, URZ ;\n" * 2, ["1000"]),
        ("        /*1000*/                   LDG.E R4, desc[UR6][R2.64+0x4] ;\n", ["1000"]),
        ("        /*1000*/                   ULDC.64 UR6, c[0x0][0x208] ;\n" + NEXT.replace("0x40000040", "UR7"), []),
        (ZERO + UPPER, []),
        (UPPER.replace("R44", "RZ"), []),
        (UPPER, ["0020"]),
        (ZERO + LOADED.replace("LDG.E.64 R44", "LDG.E.64 R43").replace("UR60", "URZ") + UPPER, ["0020"]),
        (ZERO + UPPER.replace("-0x7fffffe0", "0x40"), []),
        (UPPER.replace("-0x7fffffe0", "0x12345"), []),
    ],
)
def test_operands_from_nowhere(faults, text, where):
    assert faults(text) == where


START = "        /*0010*/                   HADD2.BF16_V2 R88, R4, -136, -136 ;\n"
PRODUCT = "        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR16], R24, gsb0 ;\n"
WAIT = "        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, {} ;\n"
ROUND = "        /*0040*/              @!P0 BRA 0x10 ;\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (START + PRODUCT + WAIT.format("0x0") + ROUND, False),
        (START + PRODUCT + WAIT.format("0x1") + ROUND, True),
        (START + PRODUCT + WAIT.format("0x1") + ROUND.replace("0x10", "0x20"), False),
        (START + PRODUCT + START, True),
        (START + PRODUCT + START.replace("R88, R4", "R92, R88"), False),
        (START + PRODUCT + START.replace("HADD2.BF16_V2 R88", "LDS.128 R85"), True),
        (START + PRODUCT.replace("R24, R88", "R24, gdesc[UR12]") + START, False),
        (START + PRODUCT + PRODUCT.replace("R88", "R92") + WAIT.format("0x1") + START, False),
    ],
)
def test_first_operands_that_are_overwritten(script, text, found):
    assert bool(list(script.overwritten(text))) is found


LOOPS = """
    %n:2 = scf.for %save = %c0 to %count step %c1 iter_args(%held_1 = %held, %begin_1 = %begin) -> (tensor<128xf32>, i32)  : i32 {
      %at = tt.addptr %ends, %save : !tt.ptr<i32>, i32 loc(#loc7)
      %upto = tt.load %at : !tt.ptr<i32> loc(#loc7)
      %held_2 = scf.for %token = %begin_1 to %upto step %c1 iter_args(%held_3 = %held_1) -> (tensor<128xf32>)  : i32 {
        %held_4 = arith.addf %held_3, %more : tensor<128xf32> loc(#loc8)
        scf.yield %held_4 : tensor<128xf32> loc(#loc9)
      } loc(#loc10)
      %later = arith.maxsi %begin_1, %upto : i32
      tt.store %to, %STORED : tensor<128x!tt.ptr<f32>>
      scf.yield %held_2, %later : tensor<128xf32>, i32
    } loc(#loc11)
    tt.return
"""
INNER = """
    %n = scf.for %row = %c0 to %count step %c1 iter_args(%step_1 = %step) -> (i32)  : i32 {
      %at = scf.while (%at_1 = %c0) : (i32) -> i32 {
        %there = arith.cmpi slt, %at_1, %count : i32
        scf.condition(%there) %at_1 : i32
      } do {
      ^bb0(%at_2: i32 loc(unknown)):
        tt.store %to, %CONDITION : tensor<128x!tt.ptr<f32>>
        %at_3 = arith.addi %at_2, %step_1 : i32
        scf.yield %at_3 : i32
      }
      %step_2 = arith.addi %step_1, %row : i32
      scf.yield %step_2 : i32
    }
"""


@pytest.mark.parametrize(
    ("code", "which"),
    [
        (LOOPS.replace("%STORED", "%held_2"), ["%begin_1"]),
        (LOOPS.replace("%STORED", "%later"), []),
        (LOOPS.replace("%STORED", "%held_2").replace("tt.return", "tt.store %to, %n#1 : i32"), []),
        (LOOPS.replace("%STORED", "%held_2").replace("= %begin_1 to", "= %c0 to"), []),
        (INNER.replace("%CONDITION", "%more"), ["%step_1"]),
        (INNER.replace("%CONDITION", "%step_1"), []),
    ],
    ids=["bounds", "stored too", "read behind the loop", "for nothing", "a while", "a while that stores it"],
)
def test_what_only_inner_loops_read_is_found(script, code, which):
    """Except for the last operand of a line each text is what Triton 3.6 writes."""
    assert [found.split(":")[0] for found in script.forgotten(code)] == which
