"""Tests of this folder need a CUDA device; elsewhere they are skipped."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items):
    """Skip everything here on a machine without a CUDA device."""
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.path.parts[-3:]:
                item.add_marker(skip)
