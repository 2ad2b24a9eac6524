"""What loading takes at its most on a CPU: quantised weights are unpacked once, into the one copy that products read."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.compiler import needs_compiler
from helpers.effort import effort
from helpers.programs import run_python
from helpers.quantise import CONFIGS, PACKED, quantise
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.resolve import resolve

SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
EXPERTS = {"qwen3_moe": {"num_hidden_layers": 3, "moe_intermediate_size": 384}, "gpt_oss": {"num_hidden_layers": 2}}
USUAL = [("qwen3", "awq"), ("qwen3_moe", "fp8 block")]
OTHERS = [
    ("gpt_oss", "mxfp4"),
    ("qwen3_moe", "gptq"),
    *(("qwen3", kind) for kind in (*CONFIGS, *PACKED)),
]  # loops pack them slowly
CODE = """
import resource, sys
from pagerunner import LLM
def taken(name):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
own, resident = taken("RssAnon"), taken("VmRSS")
llm = LLM(sys.argv[1], skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 20, max_model_len=64, use_tqdm=False)
print(taken("RssAnon") - own, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident)
"""


def grown(path: Path) -> tuple[int, int]:
    """Bytes by which a process has grown that has loaded the checkpoint, and by which it grew at its most.

    The file's bytes aren't counted: they stay in the system's cache.
    """
    done = run_python(CODE, [str(path)], dict(os.environ))
    assert done.returncode == 0, done.stderr
    now, most = map(int, done.stdout.split())
    return now, most - sum(file.stat().st_size for file in path.glob("*.safetensors"))


def weights_of(path: Path) -> int:
    plan = resolve(
        EngineArgs(model=str(path), device="cpu", num_gpu_blocks_override=64, max_model_len=64), plan_only=True
    ).plan
    return next(size for name, size in plan.other if name.startswith("weights"))


@functools.cache
def in_floats(path: Path) -> tuple[int, int]:
    """What the checkpoint of a family takes in float32."""
    return grown(path)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A float32 checkpoint of each family, made once."""

    @functools.cache
    def make(family: str) -> Path:
        maker = make_checkpoint if family == "qwen3" else make_window_checkpoint
        return maker(tmp_path_factory.mktemp(family), family, tokenizer=False, **SIZES | EXPERTS.get(family, {}))

    return make


@needs_compiler
@pytest.mark.parametrize(("family", "kind"), effort(USUAL, [*USUAL, *OTHERS]))
def test_a_quantised_checkpoint_takes_what_floats_take(
    tmp_path: Path, checkpoints: Callable[[str], Path], family: str, kind: str
) -> None:
    path = Path(shutil.copytree(checkpoints(family), tmp_path / "quantised"))
    quantise(path, kind)
    weights = weights_of(path)
    assert weights == weights_of(checkpoints(family)) > 20 << 20
    (floats, most_floats), (taken, most) = in_floats(checkpoints(family)), grown(path)
    said = f"{taken:,} bytes, {most:,} at most, with {weights:,} of weights; {floats:,} and {most_floats:,} in floats"
    # malloc keeps some of what the loading threads have freed: 3 to 15 MB; a second copy would be all of the weights
    assert weights < taken < floats + 3 * weights // 4, said
    # while matrices are being unpacked each loading thread has one; a second copy of all would be the weights once more
    assert most < most_floats + weights, said


@needs_compiler
def test_loading_imports_no_algebra(tmp_path: Path, checkpoints: Callable[[str], Path]) -> None:
    """torch imports sympy for some operations on tensors without memory. That takes 50 MB, and half a second of every start."""
    path = Path(shutil.copytree(checkpoints("qwen3"), tmp_path / "quantised"))
    quantise(path, "awq")
    done = run_python(CODE + "assert 'sympy' not in sys.modules", [str(path)], dict(os.environ))
    assert done.returncode == 0, done.stderr
