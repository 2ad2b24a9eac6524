"""Make the reference from the docstrings: a static site of one page for each module, with a search that runs in the browser.

    python scripts/reference.py [FOLDER]     (default: build/reference; `make docs`)

pdoc imports the modules and reads their docstrings and types. Nothing is fetched, here or by the pages.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import pdoc
import pdoc.render

import pagerunner

ROOT = Path(__file__).resolve().parents[1]


MODULES = ["pagerunner", "!pagerunner.__main__"]
"""The package with everything in it, as pdoc takes it."""


def make(folder: Path, names: list[str]) -> None:
    """Write the site of these modules into a folder. A module that can't be imported is an error."""
    pdoc.render.configure(
        docformat="google",
        footer_text=f"pagerunner {pagerunner.__version__}",
        show_source=False,
        mermaid=False,
        math=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Error importing")
        # Names that are imported for type checkers only: pdoc shows such an annotation as it is written.
        warnings.filterwarnings("ignore", "Error parsing type annotation")
        pdoc.pdoc(*names, output_directory=folder)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the reference from the docstrings.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "reference")
    folder = parser.parse_args(argv).folder
    make(folder, MODULES)
    print(f"The reference is in {folder / 'index.html'}.")


if __name__ == "__main__":
    main()
