"""What `ops.logprobs.gather_logprobs` has to find, for its twin and its kernel, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch


def check_rows(
    run: Callable[..., tuple[torch.Tensor, ...]], size: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Ranks and log-probabilities of tokens, some of whose rows hold -infinity, by any order of rows."""
    x = (torch.randn(9, 2 * size, device=device) * 4).to(dtype)[:, :size]
    x[2, : size // 2] = float("-inf")
    rows, chosen = (
        torch.tensor([8, 2, 0, 5], device=device),
        torch.tensor([0, size - 1, size // 2, size // 3], device=device),
    )
    count = min(3, size)
    words, logprobs = run(x, rows, chosen, count)
    assert words.dtype == torch.int32 and words.shape == logprobs.shape == (4, 1 + count)
    some = x[rows].double()
    own = some.gather(1, chosen[:, None])
    wanted = torch.cat((own, some.gather(1, words[:, 1:].long())), 1) - some.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(logprobs, wanted.float(), rtol=1e-6, atol=2e-6)
    assert torch.equal(words[:, :1], (some > own).sum(1, keepdim=True).int() + 1)
    for place in range(4):
        alone = run(x[rows[place] : rows[place] + 1], None, chosen[place : place + 1], count)
        assert torch.equal(alone[0], words[place : place + 1]) and torch.equal(alone[1], logprobs[place : place + 1])


def check_best(run: Callable[..., tuple[torch.Tensor, ...]], size: int, count: int, device: str = "cpu") -> None:
    """The best of rows of bfloat16, in which many are equal, as a stable order has them."""
    x = torch.randn(3, size, device=device).bfloat16()
    x[1, size // 3] = x[1, 7] = 9.0
    words, logprobs = run(x, None, x.argmax(1), count)
    ordered = x.float().sort(dim=-1, descending=True, stable=True)
    total = x.double().logsumexp(-1, keepdim=True)
    wanted = (ordered.values[:, :count].double() - total).float()
    torch.testing.assert_close(logprobs[:, 1:], wanted, rtol=1e-6, atol=2e-6)
    above = ordered.values[:, :count] > ordered.values[:, count : count + 1]  # of those at the border torch has any
    assert torch.equal(words[:, 1:][above].long(), ordered.indices[:, :count][above])
    assert (words[:, 0] == 1).all()


def check_equal(run: Callable[..., tuple[torch.Tensor, ...]], size: int, device: str = "cpu") -> None:
    """Rows in which all, or all but one, are equal, and one in which few are finite."""
    x = torch.zeros(3, size, device=device)
    x[1, size - 1] = 1.0
    x[2] = float("-inf")
    x[2, 40], x[2, 30] = 1.0, 2.0
    words, logprobs = run(x, None, torch.tensor([5, 5, 40], device=device), 3)
    assert words[:, 0].tolist() == [1, 2, 2]
    assert words[1, 1] == size - 1 and words[2, 1:3].tolist() == [30, 40]
    assert all(len(set(row)) == 3 for row in words[:, 1:].tolist())
    torch.testing.assert_close(logprobs[0].exp() * size, torch.ones(4, device=device))
    assert logprobs[2, 3] == float("-inf")
