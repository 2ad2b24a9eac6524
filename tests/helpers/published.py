"""The published configurations of tests/models/published, and what their makers' weights take."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).parents[1] / "models" / "published"
_SIZES = DIRECTORY.parent / "published_sizes.json"
_SECOND = ".hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class Published:
    """One repository of the Hugging Face Hub.

    `bytes` are those of the text model in its files, `how` says where the figure comes from, and `config` where config.json was read.
    """

    repository: str
    config: str
    bytes: int
    how: str

    @property
    def file(self) -> Path:
        """Its config.json."""
        return DIRECTORY / f"{self.repository.replace('/', '--')}.json"

    def place(self, directory: Path, **changes: object) -> Path:
        """A model directory under `directory` with the repository's configuration, and nothing else. `changes` replace fields."""
        made = directory / self.repository.rpartition("/")[2]
        made.mkdir()
        (made / "config.json").write_text(json.dumps({**json.loads(self.file.read_text()), **changes}))
        second = self.file.with_name(self.file.stem + _SECOND)
        if second.is_file():
            shutil.copy(second, made / "hf_quant_config.json")
        return made


def all_published() -> dict[str, Published]:
    """Every one, by its repository's name."""
    sizes = json.loads(_SIZES.read_text(encoding="utf-8"))
    return {repository: Published(repository, **facts) for repository, facts in sizes.items()}


def config_files() -> set[Path]:
    """The files of the directory that are a repository's config.json."""
    return {file for file in DIRECTORY.glob("*.json") if not file.name.endswith(_SECOND)}
