"""Each Chinese page says what its English page says: after a change of one, these tests fail until the other follows.

The pages are compared paragraph by paragraph: code blocks byte for byte; of texts the lines of headings, lists and
tables, the figures and links, the inline code, and every number.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.house.documentation_blocks import TRANSLATIONS

#: A fenced block, or the lines up to an empty one or a block.
PART = re.compile(r"^```.*?^```$|^(?!```)\S.*?(?=\n\n|\n```|\n*\Z)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<title>!?\[[^\]]*\])\((?P<target>[^)\s]+)\)")
CODE, NUMBER, CHINESE = re.compile(r"`([^`\n]+)`"), re.compile(r"\d+(?:\.\d+)*"), re.compile(r"[\u4e00-\u9fff]")
LINE = re.compile(r"^(#+ |- |\|(?=[- ]))", re.MULTILINE)
#: A text of so many characters without a Chinese one was not translated.
LONG_TEXT = 60


def english(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh.md", ".md"))


def parts(page: Path) -> list[str]:
    return PART.findall(page.read_text(encoding="utf-8"))


def kept(part: str) -> object:
    """What a translation must keep of a part: all of a code block; of a text its form and its facts."""
    if part.startswith("```"):
        return part
    links = Counter((found["title"][0], found["target"].replace(".zh.md", ".md")) for found in LINK.finditer(part))
    text = LINK.sub(lambda found: found["title"], part)
    return {
        "lines": LINE.findall(part),
        "figures and links": links,
        "inline code": Counter(CODE.findall(text)),
        "numbers": Counter(NUMBER.findall(CODE.sub("", text))),
    }


def id_of(page: Path) -> str:
    return page.name


def test_readme_and_tutorial_are_translated() -> None:
    assert [page.name for page in TRANSLATIONS] == ["README.zh.md", "tutorial.zh.md"]


@pytest.mark.parametrize("page", TRANSLATIONS, ids=id_of)
def test_both_pages_have_the_same_blocks_links_and_numbers(page: Path) -> None:
    original, translated = parts(english(page)), parts(page)
    for first, second in zip(original, translated, strict=False):
        assert kept(second) == kept(first), f"{page.name} differs from {english(page).name}:\n{first}\n\n{second}"
    assert len(translated) == len(original), f"{page.name} lacks a paragraph, or has one more"


@pytest.mark.parametrize("page", TRANSLATIONS, ids=id_of)
def test_every_paragraph_is_translated(page: Path) -> None:
    texts = [part for part in parts(page) if not part.startswith("```")]
    assert [text for text in texts if len(text) > LONG_TEXT and not CHINESE.search(text)] == []


@pytest.mark.parametrize("page", TRANSLATIONS, ids=id_of)
def test_links_lead_to_the_page_in_the_same_language(page: Path) -> None:
    """Except for the link to the other language at the top of each."""
    originals = [english(each) for each in TRANSLATIONS]
    for here, other, foreign in ((english(page), page, TRANSLATIONS), (page, english(page), originals)):
        targets = [here.parent / found["target"] for part in parts(here) for found in LINK.finditer(part)]
        assert targets[0] == other
        assert [target for target in targets if target in foreign] == [other]


def test_a_difference_is_found() -> None:
    """Of each kind: a block, a number, a link, inline code, a line of a list."""
    text = "- Run `rft run` 3 times ([guide](guide.md))."
    changes = [("3", "4"), ("guide.md", "data.md"), ("`rft run`", "`rft ui`"), ("- ", "")]
    assert all(kept(text.replace(old, new, 1)) != kept(text) for old, new in changes)
    assert kept("```bash\nrft run\n```") != kept("```bash\nrft ui\n```")
