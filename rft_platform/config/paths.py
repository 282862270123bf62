"""Paths in a configuration file are relative to that file; names of hub models and data sets are left alone."""

from copy import deepcopy
from pathlib import Path
from typing import Any

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")

_LOCAL: list[tuple[str, ...]] = [("checkpoint_root_dir",)]
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
    ("warm_start", "path"),
]


def resolve_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of the raw configuration with every local path absolute, relative ones taken from ``folder``."""
    data = deepcopy(data)
    for keys in _LOCAL:
        _rewrite(data, keys, folder, always=True)
    for keys in _LOCAL_OR_NAME:
        _rewrite(data, keys, folder, always=False)
    return data


def _rewrite(node: Any, keys: tuple[str, ...], folder: Path, *, always: bool) -> None:
    first, *rest = keys
    if first == "*":
        for item in node if isinstance(node, list) else ():
            _rewrite(item, tuple(rest), folder, always=always)
    elif isinstance(node, dict) and first in node:
        if rest:
            _rewrite(node[first], tuple(rest), folder, always=always)
        elif isinstance(node[first], str) and (always or _is_local(node[first], folder)):
            node[first] = str((folder / Path(node[first]).expanduser()).resolve())


def _is_local(value: str, folder: Path) -> bool:
    if "\n" in value or "://" in value or value.startswith("models:/"):
        return False
    if value.startswith(("/", "./", "../", "~")) or value in (".", "..") or value.endswith(DATA_SUFFIXES):
        return True
    return bool(value) and len(value) < 1024 and (folder / value).exists()
