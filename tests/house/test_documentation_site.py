"""The documentation site builds without a warning: every page is in its navigation, every link and anchor resolves."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import modules

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None,
    reason="mkdocs-material is not installed: make setup",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=REPOSITORY, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there_and_can_be_searched(site: Path) -> None:
    pages = {file.relative_to(REPOSITORY / "docs").with_suffix(".html") for file in (REPOSITORY / "docs").glob("*.md")}
    outside = ("CHANGELOG.html", "CONTRIBUTING.html", "examples/openai_loop/index.html", "modules.html")
    pages |= set(map(Path, outside))
    assert [str(page) for page in pages if not (site / page).exists()] == []
    found = {
        entry["location"].partition("#")[0]
        for entry in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    assert {str(page) for page in pages} - {"index.html"} <= found


def test_every_module_has_a_sentence() -> None:
    empty = [line for line in modules.page().splitlines() if line.startswith("| `") and not line.split("|")[2].strip()]
    assert not empty


def test_diagrams_are_rendered_by_mermaid_and_links_out_of_docs_point_to_pages(site: Path) -> None:
    assert '<pre class="mermaid">' in (site / "architecture.html").read_text(encoding="utf-8")
    assert 'href="examples/agentscope_react/index.html"' in (site / "guide.html").read_text(encoding="utf-8")
    assert 'href="architecture.html"' in (site / "CONTRIBUTING.html").read_text(encoding="utf-8")


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    """Only the theme's script does, in a page with a diagram: mermaid, unless MERMAID_JS was given."""
    loads = re.compile(
        r'<(?:script|img|iframe)[^>]+src="?https?://|<link[^>]+rel="?(?:stylesheet|preconnect)"?[^>]+https?://'
    )
    assert [str(page) for page in site.rglob("*.html") if loads.search(page.read_text(encoding="utf-8"))] == []
