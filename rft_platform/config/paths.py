"""Convert the paths in a configuration.

Paths in a user's file are relative to the folder of that file. In the copy that a home stores, paths below the home are
relative to the home. Names of models and datasets on the Hugging Face hub stay unchanged.
"""

import os
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rft_platform.config.schema.buffer import REASONING_GYM

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def is_missing(path: str) -> bool:
    """Whether ``path`` is empty, or a data file or folder that does not exist; False for the name of a dataset."""
    if not path:
        return True
    local = Path(path).is_absolute() or path.endswith(DATA_SUFFIXES) or path.count("/") > 1
    return local and not Path(path).exists()


_LOCAL: list[tuple[str, ...]] = [("checkpoint_root_dir",), ("monitor", "tensorboard_dir")]
_LOCAL_OR_NAME = [
    ("model", "model_path"),
    ("model", "critic_model_path"),
    ("model", "custom_chat_template"),
    ("algorithm", "teacher_model_path"),
    ("algorithm", "experts", "path"),
    ("buffer", "explorer_input", "taskset", "path"),
    ("buffer", "explorer_input", "tasksets", "*", "path"),
    ("buffer", "explorer_input", "eval_tasksets", "*", "path"),
    ("buffer", "eval_tasksets", "*", "path"),
    ("buffer", "trainer_input", "experience_buffer", "path"),
    ("explorer", "auxiliary_models", "*", "model_path"),
    ("explorer", "workers", "runtime_env", "working_dir"),
    ("explorer", "workers", "runtime_env", "py_modules", "*"),
    ("explorer", "workers", "runtime_env", "pip"),
    ("explorer", "workers", "runtime_env", "pip", "packages"),
    ("explorer", "workers", "runtime_env", "uv"),
    ("policies", "*", "model_path"),
    ("warm_start", "path"),
]
_INTERPRETERS = [("engine", "python"), ("explorer", "workers", "python")]

#: Function from a path in the configuration to the path that replaces it.
_Change: TypeAlias = Callable[[str], str]
_CODE = re.compile(r"(?P<file>[^:\n]+\.py):(?P<attribute>[\w.]+)")


def resolve_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of the raw configuration with every local path made absolute, relative to ``folder``."""
    data = deepcopy(data)
    for keys in _LOCAL:
        _rewrite(data, keys, lambda value: _resolved(value, folder) if _is_path(value) else value)
    for keys in _LOCAL_OR_NAME:
        _rewrite(data, keys, lambda value: _resolved(value, folder) if _is_local(value, folder) else value)
    for keys in _INTERPRETERS:
        _rewrite(data, keys, partial(_interpreter, folder=folder))
    return _with_code(data, lambda file: _resolved(file, folder) if (folder / file).is_file() else file)


def relative_paths(data: dict[str, Any], home: Path) -> dict[str, Any]:
    """A copy of a resolved configuration in which paths below ``home`` are relative to ``home``, for the stored file.

    If ``checkpoint_root_dir`` contains the home, this path and a ``tensorboard_dir`` below it are relative, too.
    """
    data, place = deepcopy(data), home.resolve()
    root = data.get("checkpoint_root_dir")
    tree = Path(root) if isinstance(root, str) and place.is_relative_to(root) else place
    for keys in _LOCAL:
        _rewrite(data, keys, partial(_relative, place=place, tree=tree))
    for keys in _LOCAL_OR_NAME:
        _rewrite(data, keys, partial(_relative, place=place, tree=place))
    return _with_code(data, partial(_relative, place=place, tree=place))


def seen_from(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of a resolved configuration in which local paths are relative to ``folder``, as in a user's file there.

    ``checkpoint_root_dir`` is not changed: the records of a project name checkpoints in this folder.
    """
    data = deepcopy(data)

    def change(value: str) -> str:
        return os.path.relpath(value, folder) if Path(value).is_absolute() else value

    for keys in (*_LOCAL_OR_NAME, *_INTERPRETERS):
        _rewrite(data, keys, change)
    return _with_code(data, change)


def without_folders(data: dict[str, Any]) -> dict[str, Any]:
    """A copy of settings in which references to code (``file.py:attribute``) name the file without its folder."""
    return _with_code(data, lambda file: Path(file).name)


def _rewrite(node: Any, keys: tuple[str, ...], change: _Change) -> None:
    first, *rest = keys
    if first == "*":
        for index, item in enumerate(node if isinstance(node, list) else ()):
            if rest:
                _rewrite(item, tuple(rest), change)
            elif isinstance(item, str):
                node[index] = change(item)
    elif isinstance(node, dict) and first in node:
        if rest:
            _rewrite(node[first], tuple(rest), change)
        elif isinstance(node[first], str):
            node[first] = change(node[first])


def _resolved(value: str, folder: Path) -> str:
    """The absolute path with links followed; a loop of links, which Path.resolve refuses, stays as it is."""
    return os.path.realpath(folder / Path(value).expanduser())


def _relative(value: str, place: Path, tree: Path) -> str:
    """``value`` relative to ``place`` if it is below ``tree``, in a form that cannot be mistaken for a name."""
    if not Path(value).is_absolute() or not Path(value).is_relative_to(tree):
        return value
    found = os.path.relpath(value, place)
    return found if found.startswith(".") else f"./{found}"


def _interpreter(value: str, folder: Path) -> str:
    """The absolute path, without following links: the interpreter of a virtual environment is a link."""
    return os.path.abspath(folder / Path(value).expanduser()) if "/" in value else value  # noqa: PTH100


def _with_code(data: dict[str, Any], change: _Change) -> dict[str, Any]:
    """A copy in which ``change`` is applied to the file part of every text ``file.py:attribute``, at any depth."""
    return {key: _code(value, change) for key, value in data.items()}


def _code(node: Any, change: _Change) -> Any:
    if isinstance(node, dict):
        return _with_code(node, change)
    if isinstance(node, list):
        return [_code(value, change) for value in node]
    if isinstance(node, str) and (found := _CODE.fullmatch(node)):
        return f"{change(found['file'])}:{found['attribute']}"
    return node


def _is_path(value: str) -> bool:
    """Whether ``value`` has the form of a path. A bare word has not: a folder of that name is rarely intended."""
    return "://" not in value and ("/" in value or value.startswith(("~", ".")))


def _is_local(value: str, folder: Path) -> bool:
    if "\n" in value or "://" in value or value.startswith(("models:/", REASONING_GYM)):
        return False
    if value.startswith(("/", "./", "../", "~")) or value in (".", "..") or value.endswith(DATA_SUFFIXES):
        return True
    return bool(value) and len(value) < 1024 and (folder / value).exists()
