"""Snapshots of the user's code: the source files of the objects that a configuration names, and what they import.

Nothing is imported or executed: the code may need packages of another environment. Files of installed packages, of the
standard library and of the platform are left out. Each different snapshot is stored once, below ``code/`` of an
experience store; a stage's note names the digest of the code that ran. Text that looks like a secret is masked, as in
log files.
"""

import ast
import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TypeVar

from rft_platform.common.errors import DamagedError, UserError
from rft_platform.common.fault_classification import is_user_code
from rft_platform.common.files import digest_json, read_sealed_json, write_sealed_json
from rft_platform.common.redaction import redact
from rft_platform.common.user_code import is_live, load_object

T = TypeVar("T")
MAX_FILES = 500
_PARSES = 10
MAX_FILE_BYTES = 1 << 20
_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_DIGEST = re.compile(r"[0-9a-f]{16}")
_REFERENCE = re.compile(rf"live:\S+|(?:.+\.py|{_NAME}):{_NAME}")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A source text whose secrets are masked, and the digest of the text before masking."""

    text: str
    sha256: str

    @classmethod
    def of(cls, text: str) -> "SourceFile":
        """``text`` masked, with its digest."""
        return cls(redact(text), sha256(text.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class CodeSnapshot:
    """Sources by file name, relative to the folder from which the file is imported."""

    files: Mapping[str, SourceFile]
    not_found: tuple[str, ...] = ()  # references whose source is in no file of this machine

    @property
    def digest(self) -> str:
        """16 hex digits; independent of the folder that holds the code."""
        texts = {name: file.sha256 for name, file in self.files.items()}
        return digest_json({"files": texts, "not_found": sorted(self.not_found)})[:16]


_NOTHING = SourceFile.of("")


def references_in(value: Any) -> Iterator[str]:
    """Every text in a configuration that has the form of a reference (``common.user_code``)."""
    if isinstance(value, str):
        if _REFERENCE.fullmatch(value):
            yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from references_in(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from references_in(entry)


def take_snapshot(references: Iterable[str], folders: Iterable[str] = ()) -> CodeSnapshot:
    """The source of the objects that ``references`` name, with all files of the user's code that they import.

    A reference is ``package.module:attribute``, ``file.py:attribute``, or the name of a module. Indirect imports are
    included. Modules are looked up in ``folders`` before ``sys.path``.
    """
    search = _Search(folders)
    for reference in sorted(set(references)):
        search.add(reference)
    left_out = [f"files beyond the first {MAX_FILES}"] if search.has_more else []
    return CodeSnapshot(dict(sorted(search.files.items())), (*search.not_found, *left_out))


class _Search:
    """Follows imports from file to file."""

    def __init__(self, folders: Iterable[str] = ()) -> None:
        self._roots = [*folders, *_roots()]
        self.files: dict[str, SourceFile] = {}
        self.not_found: list[str] = []
        self.has_more = False
        self._seen: set[Path] = set()

    def add(self, reference: str) -> None:
        """Add the files of a reference."""
        if is_live(reference):
            self._add_live(reference)
            return
        module = reference.rpartition(":")[0] or reference
        if module.endswith(".py"):
            file, roots = Path(module).absolute(), [str(Path(module).absolute().parent), *self._roots]
            found = [(file, file.parent)] if file.is_file() else []
        else:
            roots = self._roots
            found = list(_files_of(module, roots))
        if not found and (module.endswith(".py") or not _is_installed(module)):
            self.not_found.append(reference)
        self._follow(found, roots)

    def _add_live(self, reference: str) -> None:
        """The source of an object that only this process has, such as a function of a notebook."""
        name = reference.partition(":")[2]
        try:
            value = load_object(reference, "user code")
            target = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
            self.files[name] = SourceFile.of(source_of(target))
        except (UserError, OSError, TypeError):
            self.not_found.append(reference)

    def _follow(self, found: Sequence[tuple[Path, Path]], roots: Sequence[str]) -> None:
        waiting = list(found)
        while waiting:
            file, root = waiting.pop()
            if file in self._seen or not is_user_code(str(file)) or file.stat().st_size > MAX_FILE_BYTES:
                continue
            if len(self._seen) == MAX_FILES:
                self.has_more = True
                return
            self._seen.add(file)
            text = file.read_text(encoding="utf-8", errors="replace")
            source = SourceFile.of(text)
            name = str(file.relative_to(root))
            self.files[name if self.files.get(name, source) == source else str(file)] = source
            for module in _imports(text, _module_name(file, root)):
                waiting += _files_of(module, roots)


def _roots() -> list[str]:
    """The folders that modules are imported from: those of this process, then the working folder."""
    return [*(folder or str(Path.cwd()) for folder in sys.path), str(Path.cwd())]


def _files_of(module: str, roots: Sequence[str]) -> Iterator[tuple[Path, Path]]:
    """The file of a module, preceded by those of its packages, each with the folder that it is imported from."""
    search: Sequence[str] | None = roots
    parts = module.split(".")
    for depth, name in enumerate(parts):
        # by its last part: with the dotted name, a folder without __init__.py is found only if its package is imported
        spec = PathFinder.find_spec(name, search)
        if spec is None and depth == 0 and name not in sys.modules:
            spec = importlib.util.find_spec(name)  # installed in editable form, by a finder of the installer
        if spec is None:
            return
        if spec.origin is not None and spec.origin.endswith(".py"):
            file = Path(spec.origin).absolute()
            if not is_user_code(str(file)):
                return
            up = depth + (1 if file.name == "__init__.py" else 0)
            yield file, file.parents[up]
        if spec.submodule_search_locations is None:
            return
        search = list(spec.submodule_search_locations)


def _is_installed(module: str) -> bool:
    """Whether a module belongs to a package of this environment, whose version pins its code."""
    return PathFinder.find_spec(module.partition(".")[0]) is not None


def _imports(text: str, module: str) -> Iterator[str]:
    """Names of the modules that a source text may import; ``module`` is the text's module, for relative imports."""
    try:
        tree = parse_with_retries(lambda: ast.parse(text))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            start = ".".join([*package, *([node.module] if node.module else [])])
            if start:
                yield start
            yield from (".".join([start, alias.name]) for alias in node.names if start and alias.name != "*")


def _module_name(file: Path, root: Path) -> str:
    """Dotted module name of a file. For a package it ends in ``.__init__``: relative imports drop the last part."""
    return ".".join(file.relative_to(root).with_suffix("").parts)


def source_of(value: Any) -> str:
    """The source text of a function or class. Raises OSError or TypeError as ``inspect.getsource`` does."""
    return parse_with_retries(lambda: inspect.getsource(value))


def parse_with_retries(parse: Callable[[], T]) -> T:
    """The result of ``parse``, called again if Python's parser fails because another thread uses it.

    Two threads that parse at the same time disturb each other's count of the recursion depth, and one of them gets a
    SystemError (python/cpython#106905). Printing a traceback also parses.
    """
    for _ in range(_PARSES - 1):
        with suppress(SystemError):
            return parse()
    return parse()


def keep_snapshot(root: Path, snapshot: CodeSnapshot) -> str | None:
    """Store a snapshot below ``root``, unless it is there; returns its digest. None: there is no user code."""
    if not snapshot.files and not snapshot.not_found:
        return None
    file = _file(root, snapshot.digest)
    if not file.exists():
        write_sealed_json(file, asdict(snapshot))
    return snapshot.digest


def read_snapshot(root: Path, digest: str) -> CodeSnapshot | None:
    """The stored snapshot; None if the store does not have it. Raises DamagedError if its content has changed."""
    file = _file(root, digest)
    if not _DIGEST.fullmatch(digest) or not file.exists():
        return None
    try:
        content = read_sealed_json(file)
        files = {name: SourceFile(**each) for name, each in content["files"].items()}
        found = CodeSnapshot(files, tuple(content["not_found"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        found = None
    if found is None or found.digest != digest:
        raise DamagedError(f"{file}: the content does not have the digest {digest}: restore it from a backup")
    return found


def difference(old: CodeSnapshot, new: CodeSnapshot, old_name: str, new_name: str) -> Iterator[str]:
    """Lines of a unified diff over all files, then one line for each reference without a source."""
    for name in sorted({*old.files, *new.files}):
        before, after = (side.files.get(name, _NOTHING) for side in (old, new))
        labels = f"{name} ({old_name})", f"{name} ({new_name})"
        yield from difflib.unified_diff(before.text.splitlines(), after.text.splitlines(), *labels, lineterm="")
        if before.text == after.text and before.sha256 != after.sha256:
            yield f"{name}: changed only where secrets are masked"
    for sign, left_out in (("-", {*old.not_found} - {*new.not_found}), ("+", {*new.not_found} - {*old.not_found})):
        yield from (f"{sign} {reference}: no source found" for reference in sorted(left_out))


def _file(root: Path, digest: str) -> Path:
    return root / "code" / f"{digest}.json"
