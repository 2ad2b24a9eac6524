"""Documents name files that exist."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from project import checks


def script(name):
    spec = importlib.util.spec_from_file_location(name, checks.ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def documents():
    tops = [checks.ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*tops, *sorted((checks.ROOT / "docs").rglob("*.md"))]


def test_path_rule_catches():
    assert checks.missing_paths("see `memory/nowhere.py`") == ["memory/nowhere.py"]
    assert not checks.missing_paths("see `memory/planner.py`, `max_model_len` and `pyproject.toml`")


def test_documents_name_existing_files():
    missing = {str(path): checks.missing_paths(path.read_text(encoding="utf-8")) for path in documents()}
    assert {path: names for path, names in missing.items() if names} == {}


def test_link_rule_catches():
    path = checks.ROOT / "docs" / "page.md"
    text = "# One `x`, two\n[a](#one-x-two) [b](#three) [c](cli.md) [d](nothing.md) [e](cli.md#nothing) [f](https://a.b/c#d)"
    assert checks.broken_links(path, text) == ["#three", "nothing.md", "cli.md#nothing"]
    assert not checks.broken_links(path, '<a id="three"></a>[b](#three) [c](../README.md#try-it)')


def test_links_of_documents_lead_to_headings_that_exist():
    broken = {str(path): checks.broken_links(path, path.read_text(encoding="utf-8")) for path in documents()}
    assert {path: links for path, links in broken.items() if links} == {}


def test_documents_that_code_names_exist():
    named = {
        (name, path.name)
        for folder in ("src", "scripts")
        for path in (checks.ROOT / folder).rglob("*.py")
        for name in re.findall(r"docs/[\w/.-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert len({name for name, _ in named}) > 5
    assert [one for one in sorted(named) if not (checks.ROOT / one[0]).exists()] == []


def test_the_first_page_of_the_architecture_stays_short_and_names_every_room():
    text = (checks.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 500, "what one reads first; depth goes to docs/architecture/"
    rooms = {f"(architecture/{path.name}" for path in (checks.ROOT / "docs" / "architecture").glob("*.md")}
    assert len(rooms) > 5 and all(room in text for room in rooms)


def test_figures_of_the_performance_page_stand_on_the_pages_of_their_subjects():
    page = checks.ROOT / "docs" / "performance.md"
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300, "older figures go to docs/performance/"
    named = set()
    for section in text.split("\n## ")[1:]:
        links = set(re.findall(r"\]\((performance/[\w-]+\.md)", section))
        behind = "".join((page.parent / link).read_text(encoding="utf-8") for link in sorted(links))
        missing = sorted(number for number in checks.table_numbers(section) if number not in behind)
        assert not missing, (section.splitlines()[0], missing)
        named |= links
    pages = {f"performance/{one.name}" for one in (page.parent / "performance").glob("*.md")}
    assert named == pages, "a subject's page that no section names"


def test_the_readme_fits_two_screens_and_says_what_its_figures_are_of():
    text = (checks.ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(text.splitlines()) <= 100 and len(rows) - 2 <= 8
    assert "**random weights**" in text and "**greedy**" in text


def test_message_rule_catches():
    source = '"""A sentence of a docstring."""\nraise Error(f"n must be at least 1, got {n!r}.")\nlog("Took %d s.", 3)'
    literals = list(checks.text_literals(source))
    assert literals == ["n must be at least 1, got ….", "Took … s."]
    quoted = "> n must be at least 1, got …\n> Took … s.\n> n must be at least 2\n> A sentence of a docstring."
    assert checks.unknown_messages(quoted, literals) == ["n must be at least 2", "A sentence of a docstring."]


def test_the_flag_tables_are_made_from_the_code():
    module = script("vllm_table")
    document = module.DOCUMENT.read_text(encoding="utf-8")
    assert module.written(document) == document, "run `make vllm-table`"


def test_a_flag_that_the_flag_tables_have_no_word_on_is_an_error():
    module = script("vllm_table")
    with pytest.raises(module.UnlistedFlag, match="--brand-new is new"):
        module.compared("--brand-new")
    listed = [module.SAME, module.DIFFERS.keys(), module.OWN.keys()]
    assert sum(map(len, listed)) == len(frozenset().union(*listed)), "a flag is in two lists"


def test_the_figure_can_be_drawn_and_agrees_with_the_scheduler():
    module = script("draw_figures")
    figure = module.draw()  # raises if its page map and the scheduler's counts differ
    assert figure.count('class="cell">x4<') == 5
    assert len(re.findall("<rect", figure)) == 1 + 3 * module.COLUMNS * module.ROWS + 4


def test_the_picture_of_the_processes_is_the_scripts_and_names_what_exists():
    module = script("draw_processes")
    picture = module.draw()
    assert module.OUTPUT.read_text(encoding="utf-8") == picture, "run `make figures`"
    named = re.findall(r">((?:[a-z_]+/)+(?:[a-z_]+\.py)?)", picture)
    assert len(named) > 8 and all((checks.PACKAGE / name).exists() for name in named)
