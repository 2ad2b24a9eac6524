"""Look through compiled Triton kernels for what isn't as the program says: operands of tensor core instructions, and numbers that loops carry.

    python scripts/check_compiled.py [DIR]

ptxas 12.8 (of Triton 3.6) sometimes forgets the register from which it works out where a second operand lies, and adds to
whatever is in another one: products are wrong, or the card reports an illegal access. Neither the interpreter nor the PTX
shows it; ptxas 12.9 and later don't do it (`TRITON_PTXAS_PATH`). It shows in two ways: a uniform register is read that
nothing has written, or the upper half of an operand's descriptor, which is a constant, is added to something other than 0.

A second fault: a first operand may lie in registers, which the instruction reads some time after it was issued. Triton 3.6 lets up to seven such
products stay on their way when a loop comes round again, and then the registers are written for the next round. Results are wrong sometimes,
more often the longer a product takes. It shows in a write to the registers of a product before `WARPGROUP.DEPBAR` has waited for it.

A third fault: Triton 3.6 drops what a loop carries if nothing reads it. It forgets to look in the bounds of inner loops (triton-lang/triton#9036), and in what an inner
`while` carries. After `for save in range(n): for token in range(begin, upto): ...; begin = upto`, each inner loop begins where the first one began. The interpreter
does it right.

DIR is Triton's cache (default: where it is), after the kernels have run. The exit status is 1 if a kernel was found.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import triton
from triton import knobs

LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?);")
UNIFORM = re.compile(r"\bUR(\d+)\b")
REGISTER = re.compile(r"(U?R)(\d+|Z)(?:\.reuse)?")
CONSTANT = re.compile(r"-?0x[0-9a-f]+")
OPERATION = re.compile(r'(?:(%[\w$.-]+)(?::(\d+))? = )?"?([a-z]\w*(?:\.\w+)+|module)"?(.*)')
NUMBER = re.compile(r"%[\w$.-]+(?:#\d+)?")
LASTING = re.compile(
    "store|atomic|assert|print|barrier|call|asm|condition|while|return|br$|wait|copy|reduce_|scatter|gather"
)
"""Operations of Triton that do more than give a number."""
BACK = re.compile(r"\bBRA\S*\s+(?:\S+,?\s+)?0x([0-9a-f]+)")
ZERO = {"RZ", "URZ", "SRZ"}


def reads_of(operand: str, operands: list[str]) -> set[int]:
    """The uniform registers that one operand stands for."""
    found = {int(number) for number in UNIFORM.findall(operand)}
    if "gdesc[" in operand:  # where A and B lie, two registers each; A may be in registers instead
        first = 2 if re.match(r"R\d", operands[1]) else 0
        return {base + more for base in found for more in range(first, 4)}
    return found | {base + 1 for base in found if "desc[" in operand}


def width(name: str) -> int:
    """How many registers an instruction writes, at most."""
    return 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name or name.startswith("CS2R") else 1


def is_descriptor(constant: str) -> bool:
    """Whether a 32-bit constant may be the upper half of an operand's descriptor: how it is swizzled, and a small stride.

    PTX ISA, "Matrix descriptor": bits 62 and 63 of the whole are the swizzle, bits 32 to 45 the stride.
    """
    value = int(constant, 16) & 0xFFFFFFFF
    return value >> 30 != 0 and value & 0x3FFFC000 == 0


def misplaced(name: str, operands: list[str], zero: set[str]) -> bool:
    """Whether the upper half of a descriptor is added to a register that isn't in `zero`."""
    if name not in {"IADD3.X", "UIADD3.X"} or not any(CONSTANT.fullmatch(x) and is_descriptor(x) for x in operands[1:]):
        return False
    sources = [match for operand in operands[1:] if (match := REGISTER.fullmatch(operand))]
    return any(match[1] + match[2] not in zero | ZERO for match in sources)


def faults(disassembly: str) -> Iterator[str]:
    """Instructions that show the fault, in the order in which they are written."""
    written: set[int] = set()
    zero: set[str] = set()
    for line in disassembly.splitlines():
        match = LINE.match(line)
        if match is None:
            continue
        where, name, rest = match.groups()
        operands = [operand.strip() for operand in rest.split(",")]
        target = REGISTER.fullmatch(operands[0])
        reads = set[int]().union(*(reads_of(operand, operands) for operand in operands[1 if target else 0 :]))
        if reads - written or misplaced(name, operands, zero):
            yield f"{where}: {name} {rest.strip()}"
        written |= reads
        if target is None or target[2] == "Z":
            continue
        names = [f"{target[1]}{number}" for number in range(int(target[2]), int(target[2]) + width(name))]
        if target[1] == "UR":
            written |= {int(own[2:]) for own in names}
        moves = name in {"CS2R", "CS2R.32", "MOV", "UMOV", "IMAD.MOV.U32", "IMAD.MOV"}
        (zero.update if moves and set(operands[1:]) <= ZERO | zero else zero.difference_update)(names)


def _after(pending: list[tuple[str, set[int]]], line: str) -> tuple[list[tuple[str, set[int]]], str]:
    """The products on their way after an instruction, with the registers that each reads, and the product whose registers it writes."""
    match = LINE.match(line)
    if match is None:
        return pending, ""
    where, name, rest = match.groups()
    operands = [operand.strip() for operand in rest.split(",")]
    if name.startswith("WARPGROUP.DEPBAR"):
        allowed = int(operands[-1], 16)
        return pending[max(len(pending) - allowed, 0) :], ""
    target = REGISTER.fullmatch(operands[0])
    if name.startswith("HGMMA"):
        first = REGISTER.fullmatch(operands[1])
        reads = set(range(int(first[2]), int(first[2]) + 4)) if first is not None and first[2] != "Z" else set[int]()
        return [*pending, (where, reads)], ""
    if target is None or target[1] != "R" or target[2] == "Z" or name.startswith(("ST", "RED", "ATOMS", "BAR")):
        return pending, ""
    writes = set(range(int(target[2]), int(target[2]) + width(name)))
    return pending, next((product for product, reads in pending if reads & writes), "")


def overwritten(disassembly: str) -> Iterator[str]:
    """Instructions that write a first operand while a product that reads it may be on its way. Each loop is walked a second time."""
    lines = disassembly.splitlines()
    places = {match[1]: number for number, line in enumerate(lines) if (match := LINE.match(line))}
    pending: list[tuple[str, set[int]]] = []
    for number, line in enumerate(lines):
        pending, product = _after(pending, line)
        again = list(pending)
        branch = BACK.search(line)
        first = places.get(branch[1].zfill(4), number) if branch else number
        for body in lines[first:number] if pending else ():
            again, late = _after(again, body)
            product = product or late
            if product:
                break
        if product:
            yield f"{product}: its first operand is overwritten before it has ended"
            return


def disassembled(cubin: Path) -> str:
    """The kernel's instructions."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, "--dump-sass", cubin], capture_output=True, text=True, check=True).stdout


@dataclass
class Operation:
    """An operation of Triton's intermediate code. A loop carries `carried` from `begins`; what is `inside` of a loop or a condition
    yields `yields`, a list for each branch.
    """

    name: str
    results: list[str]
    operands: list[str]
    around: list[Operation]
    lasting: bool
    begins: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    yields: list[list[str]] = field(default_factory=list)


def operations(text: str) -> list[Operation]:
    """The operations of one `.ttir` file."""
    found: list[Operation] = []
    around: list[Operation] = []
    for line in text.splitlines():
        code = line.strip()
        if not code.startswith(("tt.func", "module")):
            code = re.sub(r" loc\(.*", "", code)
        if code.startswith("}"):
            last = around.pop()
            if code.endswith("{"):  # the other branch of a condition, or a loop's body
                around.append(last)
            continue
        match = OPERATION.match(code)
        if match is None:
            continue
        result, count, name, rest = match.groups()
        results = [f"{result}#{number}" for number in range(int(count))] if count else [result] if result else []
        named = NUMBER.findall(re.sub(r'"[^"]*"', "", rest))
        one = Operation(
            name, results, named, [*around], LASTING.search(name) is not None or "isVolatile = true" in rest
        )
        if name == "scf.for":
            carried = named[4:] if "iter_args(" in rest else []
            one.operands, one.carried, one.begins = named[1:4], [named[0], *carried[::2]], carried[1::2]
        elif name == "scf.yield" and around:
            around[-1].yields.append(named)
        if one.lasting:
            for outer in around:
                outer.lasting = True
        if code.endswith("{"):
            around.append(one)
        found.append(one)
    return found


def alive(loop: Operation, origin: dict[str, tuple[Operation, int]], wanted: list[str]) -> set[str]:
    """What inside of `loop` the `wanted` numbers are made of, as Triton 3.6 follows it: not through bounds of loops."""
    found: set[str] = set()
    while wanted:
        name = wanted.pop()
        one, number = origin.get(name, (loop, 0))
        if name in found or not (loop in one.around or name in loop.carried):
            continue
        found.add(name)
        if name in one.carried:
            wanted += [one.yields[0][number - 1], one.begins[number - 1]] if number else []
        elif one.name == "scf.for":
            wanted += [one.yields[0][number], one.begins[number]]
        elif one.name == "scf.if":
            wanted += one.operands + [branch[number] for branch in one.yields]
        else:
            wanted += one.operands
    return found


def forgotten(text: str) -> Iterator[str]:
    """Numbers that a loop carries for nothing but the bounds of loops inside of it, or what a `while` inside of it carries."""
    code = operations(text)
    origin = {
        name: (one, number) for one in code for names in (one.results, one.carried) for number, name in enumerate(names)
    }
    used = {name for one in code for name in (*one.operands, *one.begins)}
    for loop in code:
        if loop.name != "scf.for" or not loop.begins:
            continue
        inner = [one for one in code if loop in one.around]
        wanted = [
            name for one in inner if one.lasting and one.name not in ("scf.for", "scf.yield") for name in one.operands
        ]
        wanted += [last for name, last in zip(loop.results, loop.yields[0], strict=True) if name in used]
        bounds = [name for one in inner if one.name == "scf.for" for name in one.operands]
        bounds += [name for one in inner if one.name == "scf.while" for name in sum(one.yields, [])]
        kept, needed = alive(loop, origin, [*wanted]), alive(loop, origin, wanted + bounds)
        for name, last in zip(loop.carried[1:], loop.yields[0], strict=True):
            if last in needed - kept and last != name:
                yield f"{name}: only an inner loop reads it, in its bounds or what it carries"


def main() -> int:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", nargs="?", type=Path, default=Path(knobs.cache.dir))
    args = parser.parse_args()
    kernels = sorted(args.dir.rglob("*.cubin"))
    wrong = 0
    with ThreadPoolExecutor() as pool:
        for cubin, text in zip(kernels, pool.map(disassembled, kernels), strict=True):
            code = cubin.with_suffix(".ttir")  # kernels in Gluon have none
            if found := [*faults(text), *overwritten(text), *(forgotten(code.read_text()) if code.exists() else ())]:
                wrong += 1
                print(f"{cubin.parent.name[:12]}/{cubin.name}:", *found, sep="\n    ")
    print(f"{len(kernels)} kernels, {wrong} with operands or loops that aren't what the program says")
    return 1 if wrong or not kernels else 0


if __name__ == "__main__":
    raise SystemExit(main())
