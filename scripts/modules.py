"""The page of the documentation site that lists every module with the first sentence of its docstring and its names."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rft_platform"
HEADER = """# Modules

Every module of `rft_platform` with its first sentence and its public names.
[Architecture](architecture.md) explains how the folders work together, and has a table of common tasks.
"""
_MOST_NAMES = 8


def page() -> str:
    """The text of the page."""
    folders = sorted({file.parent for file in PACKAGE.rglob("*.py")})
    return HEADER + "".join(line for folder in folders for line in _section(folder))


def _section(folder: Path) -> Iterator[str]:
    files = sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")
    if not files:
        return
    yield f"\n## {folder.relative_to(ROOT).as_posix()}\n\n"
    start = folder / "__init__.py"
    if start.exists() and (sentence := _first_sentence(ast.parse(start.read_text(encoding="utf-8")))):
        yield f"{sentence}\n\n"
    yield "| module | what it does | names |\n|---|---|---|\n"
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_")
        ]
        shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
        yield f"| `{file.relative_to(PACKAGE).as_posix()}` | {_first_sentence(tree)} | {shown} |\n"


def _first_sentence(tree: ast.Module) -> str:
    text = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    end = min((at for mark in (". ", ": ``") if (at := text.find(mark)) > 0), default=len(text))
    sentence = text[:end].rstrip(".").replace("``", "`").replace("|", "\\|")
    return f"{sentence}." if sentence else ""
