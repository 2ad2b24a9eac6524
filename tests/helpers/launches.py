"""What Triton compiles kernels for, noted where a test runs none of them."""

from __future__ import annotations

from typing import Any


def compiled_for(kernel: Any, args: tuple[Any, ...], how: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for two launches that one compiled kernel serves: constants, and of other whole numbers whether they are 1 or multiples of 16."""
    free = kernel.kwargs.get("do_not_specialize") or ()
    given = dict(zip(kernel.arg_names, args, strict=False))
    sorts = [(name, v == 1, v % 16 == 0) for name, v in given.items() if type(v) is int and name not in free]
    constants = [(name, str(value)) for name, value in how.items() if name not in ("grid", "warmup")]
    blocks = [str(v.block_shape) for v in args if hasattr(v, "block_shape")]
    return (kernel.fn.__name__, *sorts, *sorted(constants), *blocks)
