"""Files and modules that docstrings and comments of the package name exist."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "rft_platform"
REPOSITORY = PACKAGE.parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
#: A file name; not a reference to a user's function, such as ``path/to/file.py:attribute``.
FILE = re.compile(r"(?<![\w./-])((?:\w+/)*\w+\.py)\b(?!:\w)")
#: A path in backticks that names a folder or module by slashes or by dots.
SLASHED = re.compile(r"``(\w+(?:/\w+)+)/?``")
DOTTED = re.compile(r"``((?:rft_platform\.)?[a-z_]\w*(?:\.\w+)+)(?<!\.json)``")
FOLDERS = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
#: Sections of rft.yaml, and folders.
SECTIONS = {"cluster", "evaluation"}
#: Files of users.
FOREIGN = {"gql.py", "datasets.py"}


def prose(source: str) -> Iterator[str]:
    """Docstrings (also those of attributes) and comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def file_exists(name: str, folder: Path) -> bool:
    """Whether ``name`` is a file beside the text, in the repository, or of exactly one place in the package."""
    if any((root / name).is_file() for root in (folder, PACKAGE, REPOSITORY)):
        return True
    return sum(path.parts[-len(Path(name).parts) :] == Path(name).parts for path in MODULES) == 1


def is_defined(dotted: str) -> bool:
    """Whether the name is a package, a module, or something that one of them defines or imports."""
    *parents, last = dotted.removeprefix("rft_platform.").split(".")
    place = PACKAGE.joinpath(*parents)
    if (place / last / "__init__.py").is_file() or (place / f"{last}.py").is_file():
        return True
    source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if source.is_file():
        return re.search(rf"\b{last}\b", source.read_text(encoding="utf-8")) is not None
    return bool(parents) and is_defined(".".join(parents))


def stale_names(text: str, folder: Path) -> Iterator[str]:
    """Names in ``text``, which stands in a module of ``folder``, that lead nowhere."""
    yield from (name for name in FILE.findall(text) if name not in FOREIGN and not file_exists(name, folder))
    for name in SLASHED.findall(text):
        if name.partition("/")[0] in FOLDERS and not (PACKAGE / name).exists() and not (folder / name).exists():
            yield name
    for name in DOTTED.findall(text):
        first = name.removeprefix("rft_platform.").partition(".")[0]
        if first in FOLDERS - SECTIONS and not (folder / first).exists() and not is_defined(name):
            yield name


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES}), ids=str)
def test_files_and_modules_exist(folder: Path) -> None:
    stale = [
        f"{path.name}: {name}"
        for path in sorted((PACKAGE / folder).glob("*.py"))
        for text in prose(path.read_text(encoding="utf-8"))
        for name in stale_names(text, path.parent)
    ]
    assert not stale


def test_a_stale_name_is_found() -> None:
    text = "``gone.py``, ``training/gone``, ``judging.gone``, ``common/files.py``, ``file.py:attr``, ``judging.types``"
    assert list(stale_names(text, PACKAGE / "rounds")) == ["gone.py", "training/gone", "judging.gone"]
