"""Look through compiled Triton kernels for registers that are read before anything is written to them.

    python scripts/check_compiled.py [DIR]

ptxas 12.8 (of Triton 3.6) sometimes adds to a uniform register that it never set when it works out where an operand of a
tensor core instruction lies, so that products are wrong or the card reports an illegal access. Neither the interpreter nor
the PTX shows it. DIR is Triton's cache (default: where it is), after the kernels have run. The exit status is 1 if one was found.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import triton
from triton import knobs

LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?);")
UNIFORM = re.compile(r"\bUR(\d+)\b")


def reads_of(operand: str, operands: list[str]) -> set[int]:
    """The uniform registers that one operand stands for."""
    found = {int(number) for number in UNIFORM.findall(operand)}
    if "gdesc[" in operand:  # where A and B lie, two registers each; A may be in registers instead
        first = 2 if re.match(r"R\d", operands[1]) else 0
        return {base + more for base in found for more in range(first, 4)}
    return found | {base + 1 for base in found if "desc[" in operand}


def unwritten(disassembly: str) -> Iterator[str]:
    """Instructions that read a uniform register before any instruction above has written it."""
    written: set[int] = set()
    for line in disassembly.splitlines():
        match = LINE.match(line)
        if match is None:
            continue
        where, name, rest = match.groups()
        operands = [operand.strip() for operand in rest.split(",")]
        target = UNIFORM.fullmatch(operands[0])
        reads = set[int]().union(*(reads_of(operand, operands) for operand in operands[1 if target else 0 :]))
        for register in sorted(reads - written):
            yield f"{where}: {name} {rest.strip()} (UR{register})"
        written |= reads
        if target:
            first = int(target[1])
            written |= set(range(first, first + (2 if ".64" in name or "WIDE" in name else 4 if ".128" in name else 1)))


def disassembled(cubin: Path) -> str:
    """The kernel's instructions."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, "--dump-sass", cubin], capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", nargs="?", type=Path, default=Path(knobs.cache.dir))
    args = parser.parse_args()
    kernels = sorted(args.dir.rglob("*.cubin"))
    wrong = 0
    with ThreadPoolExecutor() as pool:
        for cubin, text in zip(kernels, pool.map(disassembled, kernels), strict=True):
            if found := list(unwritten(text)):
                wrong += 1
                print(f"{cubin.parent.name[:12]}/{cubin.name}:", *found, sep="\n    ")
    print(f"{len(kernels)} kernels, {wrong} read a register that nothing wrote")
    return 1 if wrong or not kernels else 0


if __name__ == "__main__":
    raise SystemExit(main())
