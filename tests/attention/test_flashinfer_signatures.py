"""What the stand-in for FlashInfer takes for the library's signatures is what the library declares, where it is installed."""

from __future__ import annotations

import inspect

import pytest

from helpers.flashinfer_signatures import RECORDED, plain, recorded


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_signatures_are_the_librarys(name: str) -> None:
    library = pytest.importorskip("flashinfer")
    kind, method = name.split(".")
    assert plain(inspect.signature(getattr(getattr(library, kind), method))) == plain(recorded(name))
