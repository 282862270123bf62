"""Load the YAML configuration. Every error is one line with the key, the value given and the value expected."""

import os
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rft_platform.config.keys import dotted, nearest_key
from rft_platform.config.paths import resolve_paths
from rft_platform.config.schema import RftConfig
from rft_platform.errors import UserError
from rft_platform.files import digest_json


def load_config(path: str | os.PathLike[str]) -> RftConfig:
    """Read, validate and resolve a configuration file.

    Relative paths are relative to the file's folder. Raises ``UserError`` with one line for each problem.
    """
    path = Path(path).absolute()
    return build_config(resolve_paths(read_yaml(path), path.parent), source=str(path))


def build_config(data: dict[str, Any], source: str = "configuration") -> RftConfig:
    """Validate a mapping; ``source`` names it in messages. Raises ``UserError`` with one line for each problem."""
    try:
        return RftConfig.model_validate(data)
    except ValidationError as error:
        faults = [detail for detail in error.errors() if detail["type"] != "default_factory_not_called"]  # a follow-up
        lines = [_describe(detail) for detail in faults]
        raise UserError("\n".join(f"{source}: {line}" for line in lines)) from None


def dump_config(config: RftConfig) -> str:
    """The configuration as YAML with every key written out; loading it gives an equal configuration."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def config_digest(config: RftConfig) -> str:
    """SHA-256 of the configuration's content. Equal settings have equal digests, independent of the file's layout."""
    return digest_json(config.model_dump(mode="json"))


class _UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys; PyYAML silently keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} stands here a second time", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes strings which the loader would read as numbers."""


for _class in (_UniqueKeyLoader, _Dumper):  # YAML 1.1 reads 1e-6 as text; most readers expect a number
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """The content of a YAML file, not validated; raises UserError if it cannot be read."""
    if not path.is_file():
        raise UserError(f"{path}: no such configuration file; give the path of a YAML file")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a UTF-8 text file ({error.reason} at byte {error.start})") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}{where}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected sections such as 'model:' at the top, got a {type(data).__name__}")
    return data


def _describe(detail: ErrorDetails) -> str:
    key = dotted(detail["loc"], unknown=detail["type"] == "extra_forbidden")
    match detail["type"]:
        case "extra_forbidden":
            nearest = nearest_key(detail["loc"])
            return f"unknown key {key}" + (f"; did you mean {nearest}?" if nearest else "")
        case "missing":
            return f"{key} is missing: give it a value"
        case "value_error":
            return detail["msg"].removeprefix("Value error, ")
        case "model_type":
            return f"{key}: got {detail['input']!r}; expected a section, that is, indented keys"
        case _:
            return f"{key}: got {detail['input']!r}; {detail['msg'][0].lower()}{detail['msg'][1:]}"
