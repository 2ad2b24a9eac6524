"""Log-probabilities and penalties on the device at real sizes of vocabularies."""

from __future__ import annotations

import pytest
import torch

from helpers.logprob_cases import check_best, check_equal, check_rows
from helpers.penalty_cases import check_penalties
from pagerunner.ops.logprobs import gather_logprobs
from pagerunner.ops.penalties import penalized


@pytest.mark.parametrize("vocab", [1029, 151_936, 262_144])
def test_reports(vocab: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check_rows(gather_logprobs.kernel, vocab, dtype, "cuda")
    check_best(gather_logprobs.kernel, vocab, 20, "cuda")
    check_equal(gather_logprobs.kernel, vocab, "cuda")


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("gathered", [True, False])
def test_penalties(drafts: int, gathered: bool) -> None:
    check_penalties(penalized.kernel, 151_936, drafts, gathered=gathered, device="cuda")
