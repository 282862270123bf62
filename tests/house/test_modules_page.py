"""docs/modules.md names every module, with a sentence about it."""

from scripts.modules import PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "docs/modules.md is out of date: run `make modules`"


def test_every_module_has_a_sentence() -> None:
    empty = [line for line in page().splitlines() if line.startswith("| `") and line.split("|")[2].strip() == ""]
    assert not empty
