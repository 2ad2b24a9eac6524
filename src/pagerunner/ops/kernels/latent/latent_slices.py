"""How attention in the latent space is divided, and what its parts leave: shared by `latent_decode.py` and `latent_wide.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Heads and keys of a tile, its warps and stages, programs a multiprocessor, and the fewest tiles of a slice."""

    heads: int
    keys: int
    warps: int
    stages: int
    programs: int
    least: int


class Schedule(NamedTuple):
    """What `_schedule_kernel` computed for a step, for layers of one shape."""

    unit: torch.Tensor
    part: torch.Tensor
    slice: torch.Tensor


class Partial(NamedTuple):
    """What `_slices_kernel` leaves to `_values_kernel`."""

    whole_THC: torch.Tensor
    parts: torch.Tensor
    found: torch.Tensor
