"""The ceilings of the CUDA device in use, measured in about a tenth of a second."""

from __future__ import annotations

from collections.abc import Callable

from pagerunner.bench.floors import Ceilings

_COPY_BYTES = 2**30
_MATRIX = 8192
_ROUNDS = 12


def measure_ceilings() -> Ceilings:
    """A device copy of 1 GiB, and a bfloat16 product of random 8192 x 8192 matrices: medians of 12 rounds after 3."""
    return Ceilings(2 * _COPY_BYTES / _copy_seconds(), 2 * _MATRIX**3 / _product_seconds())


def _copy_seconds() -> float:
    import torch

    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    return _median(lambda: target.copy_(source))


def _product_seconds() -> float:
    import torch

    left, right = (torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    return _median(lambda: torch.mm(left, right, out=out))


def _median(work: Callable[[], object]) -> float:
    """Seconds of one round of `work` on the device."""
    import torch

    for _ in range(3):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_ROUNDS + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    times = sorted(first.elapsed_time(second) for first, second in zip(events, events[1:], strict=False))
    return float(times[len(times) // 2]) / 1e3
