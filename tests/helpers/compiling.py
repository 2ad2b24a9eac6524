"""One kernel compiled for an H100 that isn't there, and what is found in its instructions."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource

from check_compiled import disassembled, faults, forgotten, overwritten

TARGET = GPUTarget("cuda", 90, 32)
STEPS = re.compile(r"fence\.acq_rel\.\w+|griddepcontrol\.\w+|bar\.sync|(?:ld|st|atom)\.(?!param|shared)[\w.]+")
"""What PTX does to memory that other kernels and ranks see, in the order in which it is written."""
SWAPPED = re.compile(
    r"barrier\.cluster\.\w+|(?:st|ld)\.(?:shared|async)[\w.:]*|mbarrier\.try_wait|(?:ld|st)matrix|bar\.sync"
)
"""What PTX does with shared memory."""
COPIED = re.compile(r"cp\.async\.wait_group|bar\.sync|wgmma\.mma_async|ld\.shared|ldmatrix")
"""Where PTX waits for copies, for all warps, and reads shared memory."""
ALLOCATED = re.compile(r"local_alloc \{allocation\.offset = (\d+).*?memdesc<(\w+),")
PATHS = re.compile(r"fence\.acq_rel\.\w+|bar\.sync|bra(?:\.uni)?\s+\$L\w+|^\$L__BB\w+(?=:)|ret(?=;)", re.MULTILINE)
"""Where it goes on, and which barriers are on the way."""


def sums(ttgir: str) -> list[list[list[int]]]:
    """Of each block [.., .., X] whose last axis is summed: which elements of X a thread adds up, and which its neighbours, as powers of two in turn.

    Blocks whose layout isn't written in powers of two, `#ttg.linear`, are left out.
    """
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.linear<\{(.*)\}>$", ttgir, re.MULTILINE))
    found = []
    for layout in re.findall(r"tensor<\d+x\d+x\d+xf32, (#\w+)>\) -> tensor<\d+x\d+xf32", ttgir):
        if layout not in layouts:
            continue
        within, among = re.search(r"register = (\[.*?\]), lane = (\[.*?\]), warp", layouts[layout]).groups()  # type: ignore[union-attr]
        found.append([[base[2] for base in json.loads(bases) if base[2]] for bases in (within, among)])
    return found


def allocated(ttgir: str) -> dict[str, int]:
    """Where what a kernel allocates begins in shared memory, by its shape and type."""
    context = ir.context()
    ir.load_dialects(context)
    make_backend(TARGET).load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 87)
    manager.run(module, "allocate")
    return {shape: int(at) for at, shape in ALLOCATED.findall(str(module))}


def gluon(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    aligned: list[str],
    kind: Any = GluonASTSource,
    **options: Any,
) -> dict[str, Any]:
    """Compile a kernel; names in neither dictionary are 32-bit integers, `aligned` ones are divisible by 16."""
    names = kernel.arg_names
    all_types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = kind(kernel, all_types, {(names.index(name),): value for name, value in constants.items()}, attributes)
    compiled = triton.compile(source, target=TARGET, options=options)
    shared = compiled.metadata.shared
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        code = disassembled(Path(file.name))
    wrong = [*faults(code), *overwritten(code), *forgotten(compiled.asm.get("ttir", ""))]
    found = {
        "faults": wrong,
        "copies": "LDGSTS.E.BYPASS.128" in code,
        "shared": shared,
        "sums": sums(compiled.asm["ttgir"]),
    }
    ptx = compiled.asm["ptx"]
    _, *more = ptx.partition("barrier.cluster")
    found["swapped"] = SWAPPED.findall("".join(more))  # from where a cluster's programs meet
    if options.get("num_ctas", 1) > 1:
        found["allocated"] = allocated(compiled.asm["ttgir"])
    found["copied"] = COPIED.findall(ptx)
    return found | {"steps": STEPS.findall(ptx), "paths": [" ".join(one.split()) for one in PATHS.findall(ptx)]}
