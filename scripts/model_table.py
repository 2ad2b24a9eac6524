"""The table of docs/models-and-formats.md: published models, what their weights take, and the longest context on GPUs of several sizes.

The configurations are those of tests/models/published. Every figure is `pagerunner plan`'s for a GPU of that memory, with
max_model_len="auto" and all other arguments at their defaults. No GPU is needed.

    python scripts/model_table.py     # writes the table into the page
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pagerunner.config import EngineArgs
from pagerunner.engine.startup.resolve import Resolved, resolve
from pagerunner.errors import CapacityError
from pagerunner.models.configs.base import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "models-and-formats.md"
PUBLISHED = ROOT / "tests" / "models" / "published"
SIZES = PUBLISHED.parent / "published_sizes.json"
GIB = 1 << 30
MEMORIES = (16, 24, 48, 80, 141)
_BEGIN, _END = "<!-- made by `make memory-table` -->", "<!-- end -->"
_MARGIN = 1 << 50


@dataclass(frozen=True, slots=True)
class Row:
    """One model: its family, bytes of its weights on a GPU, what they are stored as, and the longest context by GiB; 0: not even one."""

    repository: str
    family: str
    weights: int
    stored: str
    lengths: tuple[int, ...]

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as the page has it."""
        lengths = (f"{length:,}" if length else "-" for length in self.lengths)
        return (self.repository, self.family, self.stored, f"{self.weights / GIB:.2f} GiB", *lengths)


def repositories() -> list[str]:
    """Every published model, by its name without the maker's."""
    names = json.loads(SIZES.read_text(encoding="utf-8"))
    return sorted(names, key=lambda name: name.partition("/")[2].removeprefix("Meta-").lower())


def row(repository: str) -> Row:
    """What the plans of one published model say."""
    with tempfile.TemporaryDirectory() as directory:
        file = PUBLISHED / f"{repository.replace('/', '--')}.json"
        shutil.copy(file, Path(directory) / "config.json")
        second = file.with_suffix(".hf_quant_config.json")
        if second.is_file():
            shutil.copy(second, Path(directory) / "hf_quant_config.json")
        whole = _plan(directory, _MARGIN)
        assert whole is not None
        weights, model = whole.plan.other[0][1], whole.model
        lengths = tuple(_longest(directory, size * GIB, weights) for size in MEMORIES)
    return Row(repository, model.family, weights, _stored(model), lengths)


def _stored(model: ModelConfig) -> str:
    """What the weights are stored as: the numbers, and who wrote them where several do."""
    if model.format is None:
        return model.dtype if model.quantization is None else str(model.quantization.get("quant_method"))
    numbers = " and ".join(dict.fromkeys(scheme.number for _, scheme in model.format.schemes if scheme is not None))
    return numbers if numbers == model.format.writer else f"{numbers} ({model.format.writer})"


def _longest(directory: str, memory: int, weights: int) -> int:
    planned = _plan(directory, memory) if weights < memory else None
    return 0 if planned is None else planned.plan.max_model_len


def _plan(directory: str, memory: int) -> Resolved | None:
    try:
        return resolve(EngineArgs(model=directory, max_model_len="auto"), memory, plan_only=True)
    except CapacityError:
        return None


def lines(rows: Iterable[Row]) -> list[str]:
    """The rows as Markdown."""
    heads = ("Repository", "Family", "Stored as", "Weights", *(f"{size} GiB" for size in MEMORIES))
    return [f"| {' | '.join(cells)} |" for cells in (heads, ("---",) * len(heads), *(one.cells for one in rows))]


def written(document: str, rows: Iterable[Row]) -> str:
    """The page with these rows as its table."""
    table = "\n".join([_BEGIN, "", *lines(rows), "", _END])
    made, count = re.subn(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", lambda _: table, document, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{DOCUMENT.name} has {count} places for the table, {_BEGIN} to {_END}; it must have one")
    return made


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8"), map(row, repositories())), encoding="utf-8")
