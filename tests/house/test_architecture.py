"""The architecture: imports point downward in the table of docs/architecture.md, nothing imports in a circle, and what
has a single place is only there."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path

import pytest

import rft_platform
from rft_platform.recipes.recipe import PROJECTS

PACKAGE = Path(rft_platform.__file__).parent
TABLE = PACKAGE.parent / "docs" / "architecture.md"
ROW = re.compile(r"^\| (\d+|ground) \| (`[^|]+`) \|", re.MULTILINE)
ENTRIES = {"__init__", "__main__"}
#: The only folder that uses Dagster's private modules, which any release may change.
INTERNALS = PACKAGE / "jobs" / "dagster_internals"
#: Modules that only ``cluster`` imports, functions that only it calls, and methods that signal a process.
PROCESS_MODULES = {"subprocess", "multiprocessing", "fcntl", "pty"}
PROCESS_FUNCTIONS = {
    "os.fork", "os.forkpty", "os.kill", "os.killpg", "os.pidfd_open", "os.popen", "os.posix_spawn", "os.posix_spawnp",
    "os.system", "os.waitid", "os.waitpid", "asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell",
    "psutil.Popen",
}  # fmt: skip
PROCESS_METHODS = {"send_signal", "suspend"}
#: Modules outside ``cluster`` that may nevertheless use some of them.
PROCESS_OWNERS = {
    # Dagster, not the platform, starts the workers of runs: cancelling one is a signal to a process of Dagster.
    "jobs.dagster_internals.run_launcher": {"send_signal"},
}

Graph = Mapping[str, Set[str]]


def levels() -> dict[str, int]:
    """Level of each package and module at the top; the ground is -1."""
    rows = ROW.findall(TABLE.read_text(encoding="utf-8"))
    return {
        name.removesuffix(".py"): -1 if level == "ground" else int(level)
        for level, names in rows
        for name in re.findall(r"`([^`]+)`", names)
    }


@cache
def modules() -> dict[str, Path]:
    """Every module of the platform by its dotted name without ``rft_platform.``; packages by the folder's name."""
    code = (file for file in PACKAGE.rglob("*.py") if PROJECTS not in file.parents)
    files = {file.relative_to(PACKAGE).with_suffix(""): file for file in code}
    return {".".join(path.parts).removesuffix(".__init__"): file for path, file in files.items()}


def imported(module: str) -> Iterator[str]:
    """Modules that ``module`` imports, inside functions too; imports for type checkers only do not count."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in skipped:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if _known(name) else node.module for name in names]
        elif isinstance(node, ast.Import) and id(node) not in skipped:
            names = [alias.name for alias in node.names]
        yield from (name.removeprefix("rft_platform.") for name in names if _known(name))


def _known(name: str) -> bool:
    return name.startswith("rft_platform.") and name.removeprefix("rft_platform.") in modules()


@cache
def file_graph() -> Graph:
    """The imports between files."""
    return {module: {other for other in imported(module) if other != module} for module in modules()}


def folder_of(module: str) -> str:
    """The folder of a module; a module at the top of the package counts as its own folder."""
    return module if modules()[module].name == "__init__.py" else module.rpartition(".")[0] or module


def folder_graph() -> Graph:
    """The imports between folders of any depth; a folder's ``__init__`` belongs to it."""
    graph: dict[str, set[str]] = defaultdict(set)
    for module, others in file_graph().items():
        graph[folder_of(module)] |= {folder_of(other) for other in others} - {folder_of(module)}
    return graph


def circles(graph: Graph) -> list[str]:
    """The groups of nodes that reach each other, each as text; nodes that ``graph`` does not list are ignored."""
    reached = {node: reachable(graph, node) & graph.keys() for node in graph}
    groups = {frozenset(other for other in reached[node] if node in reached[other]) for node in graph}
    return sorted(", ".join(sorted(group)) for group in groups if len(group) > 1)


def reachable(graph: Graph, start: str) -> set[str]:
    """The nodes on paths from ``start``; ``start`` itself only if a path leads back to it."""
    found: set[str] = set()
    left = [start]
    while left:
        new = graph.get(left.pop(), frozenset()) - found
        found |= new
        left += new
    return found


def top(module: str) -> str:
    return module.partition(".")[0]


def test_every_folder_is_in_the_table() -> None:
    assert {top(module) for module in modules()} - ENTRIES == set(levels())


def test_imports_point_downward() -> None:
    """To a lower level. Only the files of the ground may import each other; ``test_files...`` refuses circles there."""
    level = levels()
    wrong = sorted(
        f"{module} (level {level[top(module)]}) imports {other} (level {level[top(other)]})"
        for module, others in file_graph().items()
        for other in others
        if top(module) not in ENTRIES and top(other) not in {top(module), *ENTRIES}
        if level[top(other)] > level[top(module)] or level[top(other)] == level[top(module)] != -1
    )
    assert not wrong, "\n".join(wrong)


def test_folders_do_not_import_in_a_circle() -> None:
    assert circles(folder_graph()) == []


def test_files_do_not_import_in_a_circle() -> None:
    assert circles({module: others for module, others in file_graph().items() if _is_file(module)}) == []


def _is_file(module: str) -> bool:
    return modules()[module].name != "__init__.py"


def test_every_folder_names_its_modules() -> None:
    """The docstring of a folder's ``__init__`` says in which order to read it; migrations are numbered."""
    missing = {
        module
        for module, file in modules().items()
        if "." in module and file.stem != "__main__" and "migrations." not in module
        if not re.search(rf"``{module.rpartition('.')[2]}\b", _docstring(module.rpartition(".")[0]))
    }
    assert sorted(missing) == []


def _docstring(folder: str) -> str:
    return ast.get_docstring(ast.parse(modules()[folder].read_text(encoding="utf-8"))) or ""


def test_no_two_test_files_have_the_same_name() -> None:
    names = Counter(file.name for file in (PACKAGE.parent / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_only_one_folder_uses_private_modules_of_dagster() -> None:
    private = re.compile(r"\bdagster\._")
    users = [file for file in PACKAGE.rglob("*.py") if private.search(file.read_text(encoding="utf-8"))]
    assert {str(file.relative_to(PACKAGE)) for file in users if file.parent != INTERNALS} == set()
    assert users


def process_uses(source: str) -> set[str]:
    """What a module uses of the names above: modules that it imports, functions and methods that it names."""
    found: set[str] = set()
    aliases: dict[str, str] = {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            aliases |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    found |= {name.partition(".")[0] for name in aliases.values()} & PROCESS_MODULES
    found |= set(aliases.values()) & PROCESS_FUNCTIONS
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            found |= {f"{aliases.get(owner, owner)}.{node.attr}"} & PROCESS_FUNCTIONS
            found |= {node.attr} & PROCESS_METHODS
    return found


def test_only_one_folder_starts_and_ends_processes() -> None:
    used = {
        module: process_uses(file.read_text(encoding="utf-8"))
        for module, file in modules().items()
        if top(module) != "cluster"
    }
    assert {module: uses for module, uses in used.items() if uses} == PROCESS_OWNERS, (
        "call a function in a cluster.child.Child, run a program with Program, declare a Service, or lock with "
        "cluster.local.locks"
    )


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import subprocess", {"subprocess"}),
        ("from multiprocessing import Process as P", {"multiprocessing"}),
        ("def f():\n    from concurrent import futures\n    import multiprocessing.pool", {"multiprocessing"}),
        ("import os as system\nsystem.killpg(1, 9)", {"os.killpg"}),
        ("from os import fork", {"os.fork"}),
        ("import os\nlater(os.kill, 1, 9)", {"os.kill"}),
        ("import fcntl", {"fcntl"}),
        ("import asyncio\nasyncio.create_subprocess_exec('ls')", {"asyncio.create_subprocess_exec"}),
        ("from psutil import Popen", {"psutil.Popen"}),
        ("process.send_signal(2)", {"send_signal"}),
        ('"""A server: os.kill, subprocess.run, flock."""\nchild.kill()', set()),
    ],
)
def test_a_planted_use_of_a_process_is_found(source: str, found: set[str]) -> None:
    assert process_uses(source) == found


def test_the_package_uses_no_developer_tool() -> None:
    """The tools of the repository are not in the wheel."""
    tool = re.compile(r"^\s*(?:from|import) (?:chaos|scripts|benchmarks|tests)\b", re.MULTILINE)
    assert [name for name, file in modules().items() if tool.search(file.read_text(encoding="utf-8"))] == []
