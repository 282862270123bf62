"""Each distribution that the package imports is declared in pyproject.toml, and each declared one is used."""

import ast
import sys
import tomllib
from collections import defaultdict
from functools import cache
from importlib.metadata import packages_distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rft_platform.recipes.recipe import PROJECTS
from scripts.lock import REPOSITORY

PACKAGE = REPOSITORY / "rft_platform"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
#: Extras for work on the repository; users of the package do not install them.
NOT_FOR_USERS = {"dev", "docs", "deploy"}
#: Their next major version may change what the platform uses.
BOUNDED = {"datasets", "duckdb", "fsspec", "numpy", "pandas", "peft", "torch"}


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def imported_names(code: str) -> set[str]:
    """First parts of the absolute imports anywhere in a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {PACKAGE.name}


@cache
def imports() -> dict[str, list[str]]:
    """The modules of the package that import a name, by that name."""
    modules: dict[str, list[str]] = defaultdict(list)
    for file in sorted(set(PACKAGE.rglob("*.py")) - set(PROJECTS.rglob("*.py"))):
        for name in imported_names(file.read_text(encoding="utf-8")):
            modules[name].append(file.relative_to(PACKAGE).as_posix())
    return modules


@cache
def distributions() -> dict[str, list[str]]:
    return {name: [canonicalize_name(each) for each in found] for name, found in packages_distributions().items()}


def providers(name: str) -> set[str]:
    """Distributions that provide an imported name; of an extra that is not installed: the one of that name."""
    return set(distributions().get(name, [canonicalize_name(name)]))


def test_every_import_has_a_declared_distribution() -> None:
    extras = [names(needs) for extra, needs in PROJECT["optional-dependencies"].items() if extra not in NOT_FOR_USERS]
    declared = names(PROJECT["dependencies"]).union(*extras)
    missing = {name: modules for name, modules in imports().items() if not providers(name) & declared}
    assert not missing, "declare their distributions in pyproject.toml, then make lock"


def test_every_declared_distribution_is_used() -> None:
    used = set().union(*(providers(name) for name in imports()))
    assert names(PROJECT["dependencies"]) - used == set()


def test_an_import_inside_a_function_counts() -> None:
    code = "import os\nfrom . import near\ndef f():\n    import a.b\n    from c.d import e\n"
    assert imported_names(code) == {"a", "c"}


def test_the_next_major_version_is_excluded_where_it_may_break_the_platform() -> None:
    requirements = {canonicalize_name(need.name): need for need in map(Requirement, PROJECT["dependencies"])}
    unbounded = [name for name in BOUNDED if not any("<" in each.operator for each in requirements[name].specifier)]
    assert not unbounded
