"""The secret that engines prove to each other. Of one user's engines on one machine it is made by itself; others are told a file."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from pagerunner.errors import ConfigError

LEAST_BYTES = 32


def read_secret(path: str | None) -> bytes:
    """What the file holds; without a file, this user's own secret on this machine, made when it is first needed.

    Raises:
        ConfigError: the file can't be read, is short, or others may read it.
    """
    try:
        return _read(Path(path) if path else _own())
    except OSError as error:
        raise ConfigError(f"kv_connector_extra_config: secret_file: {error}.") from error


def _own() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagerunner"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "kv_secret"
    if not path.exists():
        fresh = folder / f"kv_secret.{secrets.token_hex(8)}"
        with os.fdopen(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secrets.token_bytes(LEAST_BYTES))
        try:
            os.link(fresh, path)  # of several engines that start together one wins, and all read that one's
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return path


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        found, data = os.fstat(file.fileno()), file.read(1 << 16)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"kv_connector_extra_config: secret_file: others than this user may read {path} (mode {stat.S_IMODE(found.st_mode):o}); chmod 600 it."
        )
    if len(data) < LEAST_BYTES:
        raise ConfigError(
            f"kv_connector_extra_config: secret_file: {path} has {len(data)} bytes, of at least {LEAST_BYTES}."
        )
    return data
