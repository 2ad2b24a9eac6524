"""`pagerunner collect-env`: versions and hardware, also where torch isn't installed or broken."""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from pagerunner.children import SECRETS
from pagerunner.cli.options import Parser, add_common_options
from pagerunner.errors import ConfigError

PACKAGES = (
    "pagerunner", "torch", "triton", "flashinfer-python", "numpy", "safetensors", "tokenizers", "jinja2", "msgspec",
    "pyzmq", "ray", "fastapi", "uvicorn", "prometheus-client", "transformers",
)  # fmt: skip

_SETTINGS = (
    *("OMP_", "MKL_", "CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "TRITON_"),
    *("PAGERUNNER_CPU_", "PAGERUNNER_PP_", "PAGERUNNER_RANKS_"),
)


def build_parser() -> Parser:
    """The verb's flags."""
    parser = Parser("pagerunner collect-env", "Print versions and hardware for a bug report.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_common_options(parser)
    return parser


def run(namespace: argparse.Namespace) -> int:
    """Print the report."""
    report = collect()
    if namespace.json:
        print(json.dumps(report, indent=2))
        return 0
    for section, values in report.items():
        print(f"{section}:")
        width = max((len(name) for name in values), default=0)
        for name, value in values.items():
            print(f"  {name:<{width}}  {value}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """The report as sections of name and value; nothing in it identifies the user."""
    report = {
        "system": _system(),
        "packages": {name: _version(name) for name in PACKAGES},
        "torch": _torch(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if _tells(name)},
    }
    return report | ({"ray cluster": _cluster()} if os.environ.get("RAY_ADDRESS") else {})


def _cluster() -> dict[str, Any]:
    try:
        from pagerunner.engine.startup.cluster import machines

        return {f"machine {number}": said for number, said in enumerate(machines())}
    except (ImportError, OSError, ConfigError) as error:
        return {"status": str(error)}


def _tells(name: str) -> bool:
    return name.startswith(_SETTINGS) and not name.endswith(SECRETS)


def _system() -> dict[str, Any]:
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "python": f"{platform.python_version()} ({sys.implementation.name})",
        "os": platform.platform(),
        "cpu": _first_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": affinity,
        "memory": _memory(),
    }


def _memory() -> str:
    total, available = (_first_value("/proc/meminfo", name) for name in ("MemTotal", "MemAvailable"))
    if total is None or available is None:
        return "unknown"
    total_gib, free_gib = (int(text.split()[0]) / 2**20 for text in (total, available))
    return f"{total_gib:.1f} GiB, {free_gib:.1f} GiB available"


def _first_value(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name) and ":" in line), None)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "pagerunner":
            return "not installed"
    from pagerunner import __version__

    return f"{__version__} (from source)"


def _torch() -> dict[str, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"status": f"can't be imported: {error}"}
    report: dict[str, Any] = {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda or "not built in",
    }
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        for index in range(count):
            props = torch.cuda.get_device_properties(index)
            report[f"gpu {index}"] = (
                f"{props.name}, {props.total_memory / 2**30:.1f} GiB, sm_{props.major}{props.minor}"
            )
        if count > 1:
            pairs = list(itertools.combinations(range(count), 2))
            reach = torch.cuda.can_device_access_peer
            missing = [f"{a} and {b}" for a, b in pairs if not (reach(a, b) and reach(b, a))]
            report["peer access"] = f"all pairs but {', '.join(missing)}" if missing else "all pairs"
    else:
        report["gpu"] = "none"
    return report
