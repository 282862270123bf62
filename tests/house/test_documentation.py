"""What README and docs name exists: linked files and headings, commands, options and targets, keys of rft.yaml, paths,
modules. Their Python compiles."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from rft_platform.cli.main import app
from scripts.configuration import keys

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "rft_platform"
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "README.zh.md", "AGENTS.md", "CONTRIBUTING.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted((REPOSITORY / "examples").glob("*/README.md")),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
BLOCK = re.compile(r"^```(?:bash|console|sh)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHORTENED = {"...", "FILE", "N", "D", "DIR"}
#: Paths that exist only after a command that the page names.
MADE = {"examples/tiny", "examples/*/.venv", "build/site"}
#: Dotted names that begin like a section of rft.yaml and are something else: metrics, Python modules, other files.
NO_KEYS = re.compile(r"^(?:model|policies|algorithm|buffer|explorer|engine|trainer|evaluation|registry|monitor)\.(?:"
                     r"json|py|log|lock|safetensors|md|yaml|chat|complete|policy|base_url|api_key|(?:get|set|give|extract)_\w+|"
                     r"model_name|temperature_\w+|sampling\w*)")  # fmt: skip


def name_of(page: Path) -> str:
    """A page's path in the repository."""
    return str(page.relative_to(REPOSITORY))


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / "CHANGELOG.md"], ids=name_of)
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in headings(file)):
            broken.append(target)
    assert not broken


def commands_in(page: Path) -> Iterator[str]:
    """Every call of ``rft`` in code of the page."""
    text = page.read_text(encoding="utf-8")
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S+/)?(rft (?!_).*)", line):
                yield match[1].partition(" #")[0]
    yield from (
        code for code in CODE.findall(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)) if code.startswith("rft ")
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_their_options_exist(page: Path) -> None:
    root: Any = typer.main.get_command(app)
    unknown = []
    for call in commands_in(page):
        words = shlex.split(re.split(r"[|&;>]", call)[0].replace("[", "").replace("]", ""), posix=False)[1:]
        command, words = root, [word.rstrip(",") for word in words]
        while words and hasattr(command, "commands") and not words[0].startswith("-"):
            if words[0] in SHORTENED:
                break
            if words[0] not in command.commands:
                unknown.append(call)
                break
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        given = [word.partition("=")[0] for word in words if word.startswith("--")]
        unknown += [f"{call}: {word}" for word in given if word not in options | {"--help"}]
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_keys_exist(page: Path) -> None:
    known = {re.sub(r"\[\]", "", key) for key, _ in keys()}
    known |= {key.rsplit(".", depth)[0] for key in known for depth in range(1, key.count(".") + 1)}
    sections = {key.partition(".")[0] for key in known if "." in key}
    unknown = []
    for code in CODE.findall(page.read_text(encoding="utf-8")):
        name = re.sub(r"\[\d*\]", "", code).partition(":")[0].strip()
        if (
            re.fullmatch(r"[a-z_]+(?:\.[a-z_]+)+", name)
            and name.partition(".")[0] in sections
            and not NO_KEYS.match(name)
        ):
            mapping = name.rpartition(".")[0]
            if name not in known and mapping.rpartition(".")[2] not in ("args", "vllm_args"):
                unknown.append(code)
    assert not unknown


def blocks_of(page: Path, *languages: str) -> list[str]:
    """Code blocks in one of the languages; a block in a list item without its indentation."""
    fenced = re.findall(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", body, flags=re.M) for indent, language, body in fenced if language in languages]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    code = [*CODE.findall(page.read_text(encoding="utf-8")), *"\n".join(blocks_of(page, "bash", "sh")).splitlines()]
    named = {match[1] for line in code if (match := re.match(r"(?:\S+=\S+ )*make ([a-z][\w-]*)", line.strip()))}
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_of_the_repository_exist(page: Path) -> None:
    """A path in code that begins with a folder of the repository; ``*`` and ``NAME`` stand for anything.

    A path of a module may also begin with a folder of the package, and one of a test file with a folder of the tests.
    """
    path = re.compile(rf"(?:{'|'.join(_folders(REPOSITORY))})/[\w.*/-]*")
    module = re.compile(rf"((?:{'|'.join(_folders(PACKAGE))})/[\w/]+\.py|[\w/]+/test_\w+\.py)(?:::.*)?")
    roots = (PACKAGE, REPOSITORY / "tests", REPOSITORY)
    codes = set(CODE.findall(page.read_text(encoding="utf-8")))
    missing = {
        name
        for name in codes
        if path.fullmatch(name) and not any(REPOSITORY.glob(name.replace("NAME", "*").rstrip("/")))
    }
    modules = {found[1] for name in codes if (found := module.fullmatch(name))}
    missing |= {name for name in modules if not any((root / name).is_file() for root in roots)}
    assert not missing - MADE


def _folders(root: Path) -> list[str]:
    return [entry.name for entry in root.iterdir() if entry.is_dir() and entry.name[0] not in "._"]


def test_the_table_of_tasks_names_files() -> None:
    """Every row of "Where is ...?" names at least one file; the paths are checked with those of all pages."""
    table = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Where is ...?")[1]
    rows = [line for line in table.split("\n## ")[0].splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 25
    assert [row for row in rows if not re.search(r"`[\w/]+\.py`", row)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_modules_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    started = re.findall(r"python -m (rft_platform[\w.]*|scripts[\w.]*|chaos[\w.]*)", text)
    imported = [
        node.module
        for block in blocks_of(page, "python")
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rft_platform")
    ]
    assert [name for name in {*started, *imported} if importlib.util.find_spec(name) is None] == []
