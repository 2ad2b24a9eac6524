"""Other borders between kernels for a test, so that small shapes reach each of them."""

from __future__ import annotations

from typing import Any

import pytest

from pagerunner.ops import numerics


def set_borders(monkeypatch: pytest.MonkeyPatch, of: str, **borders: Any) -> None:
    """Give one group of `numerics.FAST`, such as "attention", other numbers until the test ends."""
    fast = numerics.FAST
    monkeypatch.setattr(numerics, "FAST", fast._replace(**{of: getattr(fast, of)._replace(**borders)}))
