"""What `make` gives uv of pip's settings."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

import install


def test_uv_gets_the_settings_of_pip():
    listed = """:env:.cert='/a b/ca.crt'
global.constraint='/etc/pip/constraints.txt'
global.extra-index-url='file:///one file:///two'
global.find-links='\\n/wheels\\n/more'
global.index-url='https://index.example/simple'
global.disable_pip_version_check='1'"""
    assert install.uv_settings(listed) == {
        "SSL_CERT_FILE": "/a b/ca.crt",
        "UV_CONSTRAINT": "/etc/pip/constraints.txt",
        "UV_INDEX": "file:///one file:///two",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_DEFAULT_INDEX": "https://index.example/simple",
    }
    assert install.uv_settings("") == {}


def test_pip_installs_where_it_has_a_setting_that_uv_lacks():
    assert install.uv_settings("global.index-url='https://index.example'\nglobal.client-cert='/own.pem'") is None


def test_uv_keeps_to_the_constraints_of_pip_beside_those_of_the_project(monkeypatch: pytest.MonkeyPatch):
    """Where one is given as an argument, uv doesn't look at its variable."""
    commands = []

    def run(command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
        commands.append((command, how))
        return subprocess.CompletedProcess(command, 0, stdout="global.constraint='/one.txt\\n/two.txt'")

    monkeypatch.setattr(subprocess, "run", run)
    assert install.by_uv(["pytest"])
    command, how = commands[-1]
    files = [after for word, after in zip(command, command[1:], strict=False) if word == "--constraint"]
    assert (command[2], files) == ("uv", [install.PINS[1], "/one.txt", "/two.txt"])
    assert "UV_CONSTRAINT" not in how["env"]


@pytest.mark.parametrize("pinned", ["1.2.3", "1.2.4"])
def test_pip_is_asked_for_uv_until_its_pinned_version_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: str
) -> None:
    constraints, commands = tmp_path / "constraints.txt", []
    constraints.write_text(f"urllib3==2.0\nuv=={pinned}\n", encoding="utf-8")
    monkeypatch.setattr(install, "CONSTRAINTS", constraints)
    monkeypatch.setattr(importlib.metadata, "version", {"uv": "1.2.3"}.__getitem__)
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: commands.append(command) or subprocess.CompletedProcess(command, 0, "")
    )
    assert install.by_uv(["pytest"])
    assert [command[1:4] for command in commands if "config" not in command] == [
        *([["-m", "pip", "--disable-pip-version-check"]] if pinned == "1.2.4" else []),
        ["-m", "uv", "pip"],
    ]
