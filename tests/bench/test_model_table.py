"""The table of models, formats and contexts: the page shows what the script computes from the published configurations."""

from __future__ import annotations

import pytest

from helpers.published import all_published
from project import checks
from project.test_docs import script

PAGE = checks.ROOT / "docs" / "models-and-formats.md"


def shown() -> dict[str, str]:
    """The lines of the page's table by repository."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return {line.split(" ")[1]: line for line in lines if line.count("|") == 10 and "/" in line}


def test_every_published_model_has_its_line() -> None:
    assert list(shown()) == script("model_table").repositories()
    assert shown().keys() == all_published().keys()


@pytest.mark.parametrize("repository", ["Qwen/Qwen3-8B-FP8", "openai/gpt-oss-20b", "google/gemma-3-12b-it"])
def test_a_line_is_what_the_script_computes(repository: str) -> None:
    table = script("model_table")
    assert table.lines([table.row(repository)])[-1] == shown()[repository], "run `make memory-table`"


def test_a_page_without_a_place_for_the_table_is_an_error() -> None:
    table = script("model_table")
    with pytest.raises(ValueError, match="has 0 places"):
        table.written("no markers", [])
    page = f"before\n{table._BEGIN}\nold\n{table._END}\nafter"
    assert table.written(page, []).splitlines()[0] == "before" and "old" not in table.written(page, [])
