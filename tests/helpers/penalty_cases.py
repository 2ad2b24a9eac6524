"""What `ops.penalties.penalized` has to do, for its twin and its kernel, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagerunner.ops.penalties import Penalties


def check_penalties(
    run: Callable[..., torch.Tensor], vocab: int, drafts: int, *, gathered: bool, device: str = "cpu"
) -> None:
    """Rows with some penalties, all, and none, against one token after another."""
    factors = [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (0.5, 0.7, -0.5), (1.0, 0.0, 1.5)]
    slots, places, rows = [3, 0, 2, 4], [0, 2, 3, 1], [5, 1, 0, 4]
    seen = torch.randint(0, 6, (5, vocab)) * (torch.rand(5, vocab) < 0.4)
    guesses = torch.randint(-1, min(vocab, 8), (6, drafts)) if drafts else None
    x = torch.randn(6, vocab).bfloat16() if gathered else torch.randn(4, vocab)
    wanted = (x[torch.tensor(rows)] if gathered else x.clone()).float()
    for n, (repetition, frequency, presence) in enumerate(factors):
        own = seen[slots[n]].clone()
        for guess in [] if guesses is None else guesses[slots[n], : places[n]].tolist():
            if guess >= 0:
                own[guess] += 2
        scaled = torch.where(wanted[n] > 0, wanted[n] / repetition, wanted[n] * repetition)
        kept = torch.where(own > 0, scaled, wanted[n])
        wanted[n] = kept - frequency * (own >> 1) - presence * (own > 1)
    asked = Penalties(torch.tensor(slots), torch.tensor(factors), torch.tensor(places))
    asked = Penalties(*(one.to(device) for one in asked))
    at = torch.tensor(rows, device=device) if gathered else None
    found = run(x.to(device), at, asked, seen.int().to(device), None if guesses is None else guesses.to(device))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-6, atol=1e-6)
