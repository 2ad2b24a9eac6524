"""The pins cover everything that gets installed, and the two commands exist."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pagerunner
from project import checks


def pins():
    lines = (checks.ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {canonicalize_name(requirement.name): str(requirement.specifier) for requirement in requirements}


def direct_requirements():
    project = tomllib.loads((checks.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["dev"], *extras["docs"]]


def installed_closure():
    """Name -> version of every distribution that the project and its development extra bring in here."""
    found, waiting = {}, [(Requirement(text), ("",)) for text in direct_requirements()]
    while waiting:
        requirement, extras = waiting.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name = canonicalize_name(requirement.name)
        wanted = ("", *sorted(requirement.extras))
        if wanted in found.get(name, {}):
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found.setdefault(name, {})[wanted] = distribution.version
        waiting += [(Requirement(text), wanted) for text in distribution.requires or []]
    return {name: next(iter(versions.values())) for name, versions in found.items()}


def test_every_installed_package_is_pinned():
    closure, pinned = installed_closure(), pins()
    assert len(closure) > 30
    assert not sorted(set(closure) - set(pinned))


def test_pins_are_exact_and_are_what_is_installed():
    pinned = pins()
    assert all(re.fullmatch(r"==[\w.]+", specifier) for specifier in pinned.values())
    different = {
        name: (version, pinned[name])
        for name, version in installed_closure().items()
        if name in pinned and f"=={version.split('+')[0]}" != pinned[name]
    }
    assert not different


def test_pins_satisfy_the_requirements():
    pinned = pins()
    for text in direct_requirements():
        requirement = Requirement(text)
        version = pinned[canonicalize_name(requirement.name)].removeprefix("==")
        assert requirement.specifier.contains(version), text


def test_make_has_the_two_commands_and_ci_runs_the_second():
    makefile = (checks.ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^demo:", makefile, re.M) and re.search(r"^test:", makefile, re.M)
    ci = checks.ROOT / ".ci" / "run"
    assert ci.stat().st_mode & 0o111
    assert "set -euo pipefail" in ci.read_text(encoding="utf-8") and "make" in ci.read_text(encoding="utf-8")


def test_package_data_names_the_demo_model_and_the_page():
    project = tomllib.loads((checks.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert {"bench/configs/*.json", "demo/*/*", "server/page/*"} <= set(
        project["tool"]["setuptools"]["package-data"]["pagerunner"]
    )


def test_version_is_a_release_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+", pagerunner.__version__)


def test_every_tracked_text_file_stands_alone():
    listed = subprocess.run(["git", "ls-files"], cwd=checks.ROOT, capture_output=True, text=True, check=False)
    for name in listed.stdout.splitlines():
        path = checks.ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".svg") and path.is_file():
            found = re.search(r"(?<![\w.])/(work|root|home)/", path.read_text(encoding="utf-8"))
            assert found is None or path == checks.Path(__file__), f"{name} names a path of one machine"


def test_the_licence_is_named_and_there():
    project = tomllib.loads((checks.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE"]
    text = (checks.ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert project["authors"] and project["keywords"]
    assert not any(one.startswith("License ::") for one in project["classifiers"]), "PEP 639 forbids both"


def test_the_changelog_has_this_version_and_what_comes_after_it():
    headings = re.findall(r"^## (.+)$", (checks.ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert headings[0] == "Unreleased" and headings[1].split()[0] == pagerunner.__version__
