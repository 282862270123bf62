"""MkDocs hooks of the documentation site: repository pages outside ``docs/`` and the links between all pages.

The pages are written for a reader of the repository, so a link is relative to the file that holds it. The site shows
``docs/``, CHANGELOG, CONTRIBUTING and the README of each example. ``docs_links`` translates a link between two of these
files to their places on the site; a link to any other file of the repository becomes plain text.

Material's script loads mermaid from unpkg.com when a reader opens a page with a diagram. For readers without network,
MERMAID_JS names a ``mermaid.min.js`` (of npm's package ``mermaid``) that is copied into the site and used instead.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts import modules

REPOSITORY = Path(__file__).resolve().parents[1]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "examples/*/README.md")
MERMAID = "assets/mermaid.min.js"

_SHORT_CODE = re.compile(r"<code>(?=[^<\n]{1,40}</code>)")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside ``docs/``, the list of modules, and mermaid if MERMAID_JS names it."""
    files.append(File.generated(config, "modules.md", content=modules.page()))
    for pattern in OUTSIDE:
        for source in sorted(REPOSITORY.glob(pattern)):
            text = source.read_text(encoding="utf-8")
            files.append(File.generated(config, str(source.relative_to(REPOSITORY)), content=text))
    if mermaid := os.environ.get("MERMAID_JS"):
        files.append(File.generated(config, MERMAID, abs_src_path=str(Path(mermaid).resolve())))
        config.extra_javascript.append(MERMAID)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Translate the page's links."""
    places = {source_of(file): file.src_uri for file in files.documentation_pages()}
    parts = _CODE.split(markdown)  # every second part is code
    parts[::2] = [docs_links(part, source_of(page.file), places) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark short code, in which a browser would break ``--option`` after its hyphens, and the language of a page."""
    html = _SHORT_CODE.sub('<code class="short">', html)
    return f'<div lang="zh-Hans">{html}</div>' if page.file.src_uri.endswith(".zh.md") else html


def source_of(file: File) -> str:
    """Path of a page's file in the repository."""
    return file.src_uri if file.generated_by else f"docs/{file.src_uri}"


def docs_links(text: str, source: str, places: dict[str, str]) -> str:
    """Translate the links of the file ``source``; ``places`` maps files of the repository to pages of the site."""

    def translated(link: re.Match[str]) -> str:
        title, (target, mark, anchor) = link[1], link[2].partition("#")
        if not target or "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path not in places:
            return title if (REPOSITORY / path).exists() else link[0]  # a broken one is left for MkDocs to report
        return f"[{title}]({posixpath.relpath(places[path], posixpath.dirname(places[source]) or '.')}{mark}{anchor})"

    return _LINK.sub(translated, text)
