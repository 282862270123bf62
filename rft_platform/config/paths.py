"""Resolve the paths in a configuration relative to its file. Names of models and datasets on the hub stay unchanged."""

import os
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")

_LOCAL: list[tuple[str, ...]] = [("checkpoint_root_dir",), ("monitor", "tensorboard_dir")]
_LOCAL_OR_NAME = [
    ("model", "model_path"),
    ("model", "critic_model_path"),
    ("model", "custom_chat_template"),
    ("algorithm", "teacher_model_path"),
    ("algorithm", "experts", "path"),
    ("model", "lora_configs", "*", "path"),
    ("buffer", "explorer_input", "taskset", "path"),
    ("buffer", "explorer_input", "eval_tasksets", "*", "path"),
    ("buffer", "eval_tasksets", "*", "path"),
    ("buffer", "trainer_input", "experience_buffer", "path"),
    ("explorer", "auxiliary_models", "*", "model_path"),
    ("policies", "*", "model_path"),
    ("warm_start", "path"),
]

_CODE = re.compile(r"(?P<file>[^:\n]+\.py):(?P<attribute>[\w.]+)")


def resolve_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of the raw configuration with every local path made absolute, relative to ``folder``."""
    data = deepcopy(data)
    for keys in _LOCAL:
        _rewrite(data, keys, folder, always=True)
    for keys in _LOCAL_OR_NAME:
        _rewrite(data, keys, folder, always=False)
    _rewrite_interpreter(data, ("explorer", "workers", "python"), folder)
    with_code: dict[str, Any] = _with_code(data, folder)
    return with_code


def _rewrite(node: Any, keys: tuple[str, ...], folder: Path, *, always: bool) -> None:
    first, *rest = keys
    if first == "*":
        for item in node if isinstance(node, list) else ():
            _rewrite(item, tuple(rest), folder, always=always)
    elif isinstance(node, dict) and first in node:
        if rest:
            _rewrite(node[first], tuple(rest), folder, always=always)
        elif isinstance(node[first], str) and (_is_path(node[first]) if always else _is_local(node[first], folder)):
            node[first] = str((folder / Path(node[first]).expanduser()).resolve())


def _rewrite_interpreter(node: Any, keys: tuple[str, ...], folder: Path) -> None:
    """Make a relative path absolute without following links: the interpreter of a virtual environment is a link."""
    *sections, last = keys
    for section in sections:
        node = node.get(section) if isinstance(node, dict) else None
    if isinstance(node, dict) and isinstance(node.get(last), str) and "/" in node[last]:
        node[last] = os.path.abspath(folder / Path(node[last]).expanduser())  # noqa: PTH100


def _with_code(node: Any, folder: Path) -> Any:
    """A copy in which every ``file.py:attribute`` whose file exists has an absolute path, at any depth."""
    if isinstance(node, dict):
        return {key: _with_code(value, folder) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_code(value, folder) for value in node]
    if isinstance(node, str) and (found := _CODE.fullmatch(node)) and (folder / found["file"]).is_file():
        return f"{(folder / found['file']).resolve()}:{found['attribute']}"
    return node


def _is_path(value: str) -> bool:
    """Whether ``value`` is written as a path; a bare word is not, since a folder of that name is rarely intended."""
    return "/" in value or value.startswith(("~", "."))


def _is_local(value: str, folder: Path) -> bool:
    if "\n" in value or "://" in value or value.startswith("models:/"):
        return False
    if value.startswith(("/", "./", "../", "~")) or value in (".", "..") or value.endswith(DATA_SUFFIXES):
        return True
    return bool(value) and len(value) < 1024 and (folder / value).exists()
