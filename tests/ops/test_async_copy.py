"""Host memory that steps use one after another."""

from __future__ import annotations

import torch

from pagerunner.ops.async_copy import BestCopies


def test_memory_is_used_again_once_it_has_been_read_and_not_before() -> None:
    copies = BestCopies(4, torch.device("cpu"))
    tokens, best = torch.tensor([7, 8, 9]), torch.tensor([0.5, -1.0, 2.0])
    first = copies.copy(tokens, best)
    second = copies.copy(tokens[:2] + 10, best[:2])
    tokens.zero_()  # what the step had there is the next step's
    assert first.lists() == [[7, 8, 9], [0.5, -1.0, 2.0]]
    third = copies.copy(torch.tensor([1]), torch.tensor([3.0]))
    assert third._buffers is first._buffers is not second._buffers
    assert (second.lists(), third.lists()) == ([[17, 18], [0.5, -1.0]], [[1], [3.0]])


def test_no_logit_is_lost_that_says_there_is_no_token() -> None:
    copies = BestCopies(2, torch.device("cpu"))
    found = copies.copy(torch.tensor([0, 0]), torch.tensor([float("-inf"), float("nan")])).lists()[1]
    assert found[0] == float("-inf") and found[1] != found[1]
