"""How the core process builds its core: the ordinary one, with a progress bar on standard error."""

from __future__ import annotations

from tqdm import tqdm

from pagerunner.config import EngineArgs
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.startup.build import build_core


def build_with_progress(args: EngineArgs) -> EngineCore:
    """`build_core` with a bar while weights load, when standard error is a terminal."""
    with tqdm(desc="Loading weights", unit="B", unit_scale=True, disable=None, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return build_core(args, progress)
