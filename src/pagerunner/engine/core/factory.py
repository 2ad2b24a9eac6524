"""How the core process builds its core: the ordinary one, with a progress bar on standard error. Importing this needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tqdm import tqdm

from pagerunner.config import EngineArgs
from pagerunner.engine.core.executors.places import EarlyRanks

if TYPE_CHECKING:
    from pagerunner.engine.core.core import EngineCore
    from pagerunner.engine.worker.build import Progress


def build_with_progress(args: EngineArgs, available: int | None, engine: int = 0) -> EngineCore:
    """`build_core` with a bar while weights load, when standard error is a terminal and no other engine writes there."""
    with EarlyRanks(args) as early, loading_bar(args.engines == 1) as progress:
        from pagerunner.engine.startup.build import build_core  # a second or more, as it imports torch

        return build_core(args, progress, available, engine, early)


@contextmanager
def loading_bar(show: bool = True) -> Iterator[Progress]:
    """A bar while weights load, unless standard error is no terminal; without `show` there is none."""
    disable = None if show else True
    with tqdm(desc="Loading weights", unit="B", unit_scale=True, disable=disable, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
