"""The compiler's view of kernels that run here in its interpreter."""

from __future__ import annotations

import torch

from helpers import front_end


def test_what_the_interpreter_runs_and_the_compiler_refuses_is_said():
    """With the constants, and with the reason, which is the error's cause; and nothing of what can be compiled."""
    out = torch.zeros(8, dtype=torch.int32)
    cases = [{"N": 8, "LESS": less} for less in (8, 4)]
    for case in cases:
        front_end.grows_kernel[(1,)](out, **case)
    assert out.tolist() == [27] * 4 + [4, 5, 6, 7]
    [said] = front_end.refused([front_end.noted(front_end.grows_kernel, (out,), case) for case in cases])
    assert "grows_kernel for {'N': 8, 'LESS': 4}" in said and "Loop-carried variable place" in said
