"""Install packages into this Python's environment, as pip does but in a third of the time: by uv, where pip can bring it.

    python scripts/install.py --no-build-isolation --editable '.[dev]'

uv gets pip's own settings: indexes, folders of wheels, certificates. It knows no others, so pip installs where pip has more of them, where uv can't be
had, and where uv fails. The last says what is wrong. Versions are those of constraints.txt.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

UV = {
    "cert": "SSL_CERT_FILE",
    "constraint": "UV_CONSTRAINT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "no-index": "UV_NO_INDEX",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}
"""What pip's settings are called by uv."""
OF_NO_IMPORTANCE = {
    "disable-pip-version-check",
    "no-cache-dir",
    "no-input",
    "progress-bar",
    "quiet",
    "root-user-action",
}
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
PINS = ["--constraint", str(CONSTRAINTS)]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def uv_settings(listed: str) -> dict[str, str] | None:
    """Of the lines of `pip config list`, uv's variables; None if there is a setting that uv doesn't have."""
    found: dict[str, str] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        name = name.rpartition(".")[2].replace("_", "-")
        if name in UV:
            words = value.strip("'\"").replace("\\n", " ").split()
            found[UV[name]] = ("," if name == "find-links" else " ").join(words)
        elif name not in OF_NO_IMPORTANCE:
            return None
    return found


def has_uv() -> bool:
    """Whether uv is there in its pinned version. pip would take a second to say so."""
    try:
        version = importlib.metadata.version("uv")
    except importlib.metadata.PackageNotFoundError:
        return False
    return f"uv=={version}" in CONSTRAINTS.read_text(encoding="utf-8").splitlines()


def by_uv(arguments: list[str]) -> bool:
    """Whether uv has installed them."""
    settings = uv_settings(subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout)
    if settings is None:
        return False
    if not has_uv() and subprocess.run([*PIP, "install", *PINS, "uv"], capture_output=True, check=False).returncode:
        return False
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    command += ["--index-strategy", "unsafe-best-match", *PINS, *arguments]  # as pip, which looks into all indexes
    for more in settings.pop("UV_CONSTRAINT", "").split():  # a variable doesn't count beside PINS
        command += ["--constraint", more]
    return not subprocess.run(command, env=os.environ | settings, capture_output=True, check=False).returncode


if __name__ == "__main__":
    if not by_uv(sys.argv[1:]):
        command = [*PIP, "install", "--quiet", "--quiet", "--no-compile", *PINS, *sys.argv[1:]]
        sys.exit(subprocess.run(command, check=False).returncode)
