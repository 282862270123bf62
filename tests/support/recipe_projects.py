"""The Python files of recipes as modules, although nothing in the package imports them."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from rft_platform.recipes.recipe import PROJECTS


def modules_of(project: str | Path, *names: str) -> list[ModuleType]:
    """Modules of a recipe, or of a project in a folder. None stays imported: file names repeat."""
    folder = PROJECTS / project
    files = [file.stem for file in folder.glob("*.py")]
    before = {name: sys.modules.pop(name) for name in files if name in sys.modules}
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, str(folder))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(folder))
        sys.dont_write_bytecode = written
        for name in files:
            sys.modules.pop(name, None)
        sys.modules.update(before)
