"""The secret is one for all engines of a user, and nobody else's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagerunner.errors import ConfigError
from pagerunner.tiers.secret import read_secret


def test_engines_that_start_together_have_one_secret(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: read_secret(None), range(16)))
    assert len(found) == 1 and len(found.pop()) == 32
    folder = tmp_path / "new" / "pagerunner"
    assert [path.name for path in folder.iterdir()] == ["kv_secret"]
    assert (folder / "kv_secret").stat().st_mode & 0o777 == 0o600


def test_a_file_is_refused_that_others_may_read_or_that_is_short(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match=r"secret_file: .*No such file"):
        read_secret(str(path))
    path.write_bytes(b"x" * 40)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"others than this user may read .* \(mode 640\)"):
        read_secret(str(path))
    path.chmod(0o600)
    assert read_secret(str(path)) == b"x" * 40
    path.write_bytes(b"x" * 31)
    with pytest.raises(ConfigError, match="has 31 bytes, of at least 32"):
        read_secret(str(path))
