"""Reading the YAML file: every fault is one clear line that names the key, what was given and what is expected."""

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

    Relative paths are taken from the file's folder. Raises ``UserError`` with one line for each fault.
    """
    path = Path(path).absolute()
    return build_config(resolve_paths(read_yaml(path), path.parent), source=str(path))


def build_config(data: dict[str, Any], source: str = "configuration") -> RftConfig:
    """Validate a mapping; ``source`` names it in messages. Raises ``UserError`` with one line for each fault."""
    try:
        return RftConfig.model_validate(data)
    except ValidationError as error:
        faults = [detail for detail in error.errors() if detail["type"] != "default_factory_not_called"]  # of another
        lines = [_describe(detail) for detail in faults]
        raise UserError("\n".join(f"{source}: {line}" for line in lines)) from None


def dump_config(config: RftConfig) -> str:
    """The configuration as YAML with every key written out; it loads back equal."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def config_digest(config: RftConfig) -> str:
    """SHA-256 of the configuration's content: equal settings have equal digests, however they were written."""
    return digest_json(config.model_dump(mode="json"))


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML lets the last of two equal keys win in silence; here they are an error."""

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
    """Puts in quotes what the loader would read as a number."""


for _class in (_UniqueKeyLoader, _Dumper):  # YAML 1.1 reads 1e-6 as text, everybody else as a number
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file as it stands, not validated; UserError where it cannot be read."""
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
