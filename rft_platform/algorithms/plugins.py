"""Import the user modules that register advantages and losses with decorators, before names are looked up.

A module is imported again if its file has changed, also in a trainer that runs for many rounds. A package, with all
modules below it, is imported again if any of its files has changed.
"""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from rft_platform.algorithms.common.registry import REGISTRIES
from rft_platform.common.errors import UserError
from rft_platform.common.fault_classification import user_place
from rft_platform.common.files import digest_file, digest_json
from rft_platform.common.user_code import find_working_folder

_imported: dict[str, str] = {}  # digest of each plugin's files when it was imported


def import_plugins(names: Iterable[str]) -> None:
    """Import every module of ``names`` that is new or has changed.

    Raises UserError if a module cannot be imported, or registers a name that is already taken.
    """
    for name in names:
        module = sys.modules.get(name)
        if module is not None and _imported.setdefault(name, _digest(module)) == _digest(module):
            continue
        _forget(name)
        find_working_folder()
        try:
            importlib.invalidate_caches()  # the import system may not know a module that was just written
            module = importlib.import_module(name)
        except Exception as error:  # user code may raise anything
            _forget(name)
            place = user_place(error)
            raise UserError(
                f"algorithm.plugins: {name} cannot be imported: {type(error).__name__}: {error}"
                f"{f' ({place})' if place else ''}; is it on PYTHONPATH?"
            ) from error
        _imported[name] = _digest(module)


def plugins_digest(names: Iterable[str]) -> str | None:
    """Digest of the plugins' code at the time of import; None without plugins. Call it after ``import_plugins``."""
    imported = [[name, _imported[name]] for name in names]
    return digest_json(imported) if imported else None


def _forget(name: str) -> None:
    """Undo the import of ``name`` and the modules below it, also if the import failed halfway."""
    for registry in REGISTRIES:
        registry.forget(name)
    for module in [module for module in sys.modules if f"{module}.".startswith(f"{name}.")]:
        del sys.modules[module]
    _imported.pop(name, None)


def _digest(module: ModuleType) -> str:
    """Digest of the module's file, or of all Python files of a package; the folder's path does not count."""
    found: dict[str, str] = {}
    for folder in map(Path, getattr(module, "__path__", ())):
        found |= {file.relative_to(folder).as_posix(): digest_file(file) for file in folder.rglob("*.py")}
    file = getattr(module, "__file__", None)
    if not found and file and Path(file).is_file():
        found = {Path(file).name: digest_file(Path(file))}
    return digest_json(found)
