"""Load the YAML configuration, with interpolation: ``${oc.env:NAME,default}`` and ``${section.key}``, by OmegaConf.

Every error is one line with the key, the value given and the value expected. For an unknown key it names the known key
that was probably meant.

A user's file is interpolated when it is read. The copy that a project stores contains values instead of expressions, so
that a later process with another environment reads the same settings. The copy writes a literal ``${`` as ``\\${``.
"""

import difflib
import os
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rft_platform.common.errors import UserError
from rft_platform.common.files import digest_json
from rft_platform.common.redaction import names_a_secret
from rft_platform.config.foreign.convert import convert
from rft_platform.config.foreign.defaults import convert_with_defaults
from rft_platform.config.home import Home
from rft_platform.config.paths import relative_paths, resolve_paths
from rft_platform.config.reference import keys, sections_of
from rft_platform.config.schema.rft_config import RftConfig

Place = tuple[Any, ...]  # keys and indices
Read = Callable[[Place, str], Any]

_MARK = "${"
_VARIABLE = re.compile(r"Environment variable '(?P<name>[^']*)' not found")
_LITERAL = re.compile(r"(?<!\\)(\\*+)\$\{")
_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\\$\{")
_ENVIRONMENT = re.compile(r"""(?<!\\)(?:\\\\)*\$\{\s*oc\.env\s*:\s*['"]?(?P<name>\w+)""")
_VARIABLE_NAME = re.compile(r"[A-Za-z_]\w*")
_MISSING_KEY = re.compile(r"Interpolation key '(?P<key>[^']*)' not found")


def interpolate(data: dict[str, Any], source: str, read: Read = lambda _, text: text) -> dict[str, Any]:
    """A copy of ``data`` with every expression replaced by its value; ``source`` names the file in messages.

    ``read``: converts a text that came from environment variables to the value for its place in the file.
    Raises UserError for an expression without a value, or for an environment variable that holds a secret.
    """
    if not _contains_expression(data):
        return data
    for place, text in _texts(data, ()):
        for found in _ENVIRONMENT.finditer(text):
            if names_a_secret(found["name"]):
                raise UserError(f"{source}: {_secret(place, found['name'])}")
    typed = _with_values(data, _resolved(data, source), read, ())
    return {str(key): value for key, value in _resolved(typed, source).items()}


def _resolved(data: dict[str, Any], source: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.create(data, flags={"allow_objects": True}), resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{source}: {_described(error)}") from None


def _with_values(raw: Any, resolved: Any, read: Read, place: Place) -> Any:
    """Replace each text in ``raw`` that names environment variables by its value, so that references see the value."""
    if isinstance(raw, dict):
        return {key: _with_values(value, resolved[key], read, (*place, key)) for key, value in raw.items()}
    if isinstance(raw, list):
        pairs = enumerate(zip(raw, resolved, strict=True))
        return [_with_values(value, found, read, (*place, index)) for index, (value, found) in pairs]
    if not isinstance(raw, str) or _ENVIRONMENT.search(raw) is None:
        return raw
    return escaped(read(place, resolved) if isinstance(resolved, str) else resolved)


def _texts(node: Any, place: Place) -> Iterator[tuple[Place, str]]:
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _texts(value, (*place, key))
    elif isinstance(node, str):
        yield place, node


def _secret(place: Place, variable: str) -> str:
    return (
        f"{'.'.join(map(str, place))}: the value of ${{oc.env:{variable}}} would be stored as plain text: read the "
        "variable in your code, or name it in api_key_env"
    )


def escaped(data: Any) -> Any:
    """A copy of ``data`` with every ``${`` escaped; ``interpolate`` returns the texts of ``data`` from this copy."""
    return _with_texts(data, lambda text: _LITERAL.sub(r"\1\1\\${", text))


def unescaped(data: Any) -> Any:
    """The inverse of ``escaped``; evaluates nothing."""
    return _with_texts(data, lambda text: _ESCAPED.sub(lambda found: found[1][::2] + _MARK, text))


def _with_texts(node: Any, change: Callable[[str], str]) -> Any:
    if isinstance(node, dict):
        return {key: _with_texts(value, change) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_texts(value, change) for value in node]
    return change(node) if isinstance(node, str) and _MARK in node else node


def _contains_expression(node: Any) -> bool:
    if isinstance(node, dict):
        return any(_contains_expression(value) for value in node.values())
    if isinstance(node, list):
        return any(_contains_expression(value) for value in node)
    return isinstance(node, str) and _MARK in node


def _described(error: Any) -> str:
    """What is wrong with an expression and how to repair it, with the key that contains it."""
    key, reason = error.full_key or "configuration", str(error).splitlines()[0]
    if variable := _VARIABLE.search(reason):
        name = variable["name"]
        return f"{key}: the environment variable {name} is not set; set it, or write ${{oc.env:{name},DEFAULT}}"
    if missing := _MISSING_KEY.search(reason):
        name = missing["key"]
        hint = f"; an environment variable is ${{oc.env:{name}}}" if _VARIABLE_NAME.fullmatch(name) else ""
        return f"{key}: ${{{name}}} names a key that this file does not set; set {name}{hint}"
    if _MARK not in reason and type(error).__name__ in ("UnsupportedValueType", "KeyValidationError"):
        return f"{key}: {reason}"
    return f"{key}: cannot be interpolated: {reason}; a literal ${{ is written \\${{"


Location = tuple[int | str, ...]
#: Names that other frameworks give to keys, if they are not similar to the key.
_COMMON_NAMES: dict[int | str, str] = {"learning_rate": "lr"}


def dotted(location: Location, *, unknown: bool = False) -> str:
    """The location of a validation error as the user would write it: ``explorer.auxiliary_models[0].name``.

    ``unknown``: the last part is a key that the schema does not have.
    """
    parts, _ = _walk(location[:-1] if unknown else location)
    if unknown:
        parts.append(location[-1])
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def nearest_key(location: Location) -> str | None:
    """The known key most similar to the unknown key at ``location``, or None if no key is similar.

    A key of the same section is preferred; else a key with the same or a similar name in another section.
    """
    *parents, last = location
    last = _COMMON_NAMES.get(last, last)
    section = next(sections_of(_walk(parents)[1]), None)
    if section is not None:
        similar = difflib.get_close_matches(str(last), list(_names(section)), n=3, cutoff=0.6)
        similar.sort(key=lambda name: sorted(name) != sorted(str(last)))  # first those with swapped letters
        if similar:
            return dotted((*parents, similar[0]), unknown=True)
    elsewhere: dict[str, str] = {}
    for path in sorted((key for key, _ in keys()), key=lambda path: path.count(".")):
        elsewhere.setdefault(path.rpartition(".")[2], path)
    similar = difflib.get_close_matches(str(last), elsewhere, n=1, cutoff=0.8)
    return elsewhere[similar[0]] if similar else None


def _walk(location: Iterable[int | str]) -> tuple[list[int | str], Any]:
    """The location without the union tags that pydantic inserts, and the annotation of the schema there."""
    annotation: Any = RftConfig
    parts: list[int | str] = []
    for part in location:
        section = next(sections_of(annotation), None)
        if section is not None and str(part) in section.model_fields:
            annotation = section.model_fields[str(part)].annotation
        elif typing.get_origin(annotation) is dict:
            annotation = typing.get_args(annotation)[1]
        elif not isinstance(part, int):
            continue
        parts.append(part)
    return parts, annotation


def _names(section: type[BaseModel]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield name
        if isinstance(field.validation_alias, AliasChoices):
            yield from (choice for choice in field.validation_alias.choices if isinstance(choice, str))


def load_config(path: str | os.PathLike[str]) -> RftConfig:
    """Read and validate a configuration file, of this platform or of Trinity-RFT.

    Relative paths are relative to the file's folder. Raises ``UserError`` with one line for each problem.
    """
    path = Path(path).absolute()
    data, notices = read_settings(path)
    return build_config(data, str(path), notices).in_folder(path.parent)


def read_settings(path: Path, *, own_functions: bool = False) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings in a user's file, not validated, and one line for each foreign key without effect.

    Expressions are interpolated, foreign keys and names are converted, and paths are relative to the file's folder.
    What a foreign file leaves out has the default of the other system.
    ``own_functions``: the caller has its own defaults, and replaces the workflows that the file names.
    Raises UserError.
    """
    given = interpolate(read_yaml(path), str(path), _scalar)
    if own_functions:
        data, notices = convert(given, str(path), own_functions=True)
    else:
        data, notices = convert_with_defaults(given, str(path))
    return resolve_paths(data, path.parent), notices


def load_config_of(home: Home) -> RftConfig:
    """Read a project's stored configuration; the project may have been copied or moved. Raises ``UserError``."""
    data = resolve_paths(unescaped(read_yaml(home.config_file)), home.root)
    config = build_config(data, source=str(home.config_file))
    source = home.config_source
    return config.in_folder(Path(source.read_text(encoding="utf-8")) if source.exists() else None)


def build_config(data: dict[str, Any], source: str = "configuration", notices: tuple[str, ...] = ()) -> RftConfig:
    """Validate a mapping; ``source`` names it in messages. Raises ``UserError`` with one line for each problem.

    ``notices``: lines about foreign keys without effect, which the plan of a run shows.
    """
    try:
        return RftConfig.model_validate(data).with_notices(notices)
    except ValidationError as error:
        # pydantic reports "default_factory_not_called" as a consequence of another error.
        faults = [detail for detail in error.errors() if detail["type"] != "default_factory_not_called"]
        lines = [_describe(detail) for detail in faults]
        raise UserError("\n".join(f"{source}: {line}" for line in lines)) from None


def dump_config(config: RftConfig, home: Home | None = None) -> str:
    """The configuration as YAML with every key written out; loading it gives an equal configuration.

    ``home``: the text is for the configuration file of this home, so paths below the home are relative.
    """
    data = escaped(config.model_dump(mode="json"))
    return yaml.dump(relative_paths(data, home.root) if home else data, Dumper=_Dumper, sort_keys=False)


def config_digest(config: RftConfig) -> str:
    """SHA-256 of the configuration's content. Equal settings have equal digests, independent of the file's layout."""
    return digest_json(config.model_dump(mode="json"))


_MOST_BYTES = 1 << 18  # of a file; PyYAML reads about 100 kB a second
_MOST_VALUES = 100_000  # of a file, each counted wherever an alias repeats it
_MOST_LEVELS = 100
_MOST_DIGITS = 19


class _UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, which PyYAML silently drops, and texts that mean huge values."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            self._count(node, {}, 1)
        return node

    def _count(self, node: yaml.Node, counts: dict[int, int], level: int) -> int:
        """The number of values below a node, with aliases. ``counts``: those known; 0 while a node is counted."""
        if id(node) in counts:
            if counts[id(node)] == 0:
                raise _too_large(node, "a section or list contains itself")
            return counts[id(node)]
        if level > _MOST_LEVELS:
            raise _too_large(node, f"nested too deep: expected at most {_MOST_LEVELS} levels")
        if isinstance(node, yaml.ScalarNode):
            digits = sum(map(str.isdigit, node.value)) if node.tag == "tag:yaml.org,2002:int" else 0
            if digits > _MOST_DIGITS:
                raise _too_large(node, f"a number of {digits} digits: expected at most {_MOST_DIGITS}")
            return 1
        counts[id(node)] = 0
        is_mapping = isinstance(node, yaml.MappingNode)
        parts = [part for pair in node.value for part in pair] if is_mapping else node.value
        total = 1 + sum(self._count(part, counts, level + 1) for part in parts)
        if total > _MOST_VALUES:
            raise _too_large(node, f"more than {_MOST_VALUES:,} values, counted wherever an alias repeats them")
        counts[id(node)] = total
        return total

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping. Raises ConstructorError if a key occurs twice."""
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} occurs twice in this section", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _too_large(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes strings which the loader would read as numbers."""


for _class in (_UniqueKeyLoader, _Dumper):  # PyYAML (YAML 1.1) reads 1e-6 as text; users expect a number
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """The content of a YAML file, not validated; raises UserError if it cannot be read."""
    if not path.is_file():
        raise UserError(f"{path}: no such configuration file; give the path of a YAML file")
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise UserError(f"{path}: {size:,} bytes, larger than a configuration may be ({_MOST_BYTES:,})")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except RecursionError:
        raise UserError(f"{path}: not readable YAML: nested too deep; expected at most {_MOST_LEVELS} levels") from None
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


_SCALARS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("int", "float", "bool", "null"))


def _scalar(place: Location, text: str) -> Any:
    """Parse ``text`` like an unquoted YAML value: a number, a boolean, null or text.

    If the schema expects text at ``place``, ``text`` is returned unchanged.
    """
    tag = _UniqueKeyLoader("").resolve(yaml.ScalarNode, text, (True, False))
    if not text or tag not in _SCALARS or _is_text(place[2:] if place[:1] == ("stages",) else place):
        return text
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, ValueError):
        return text


def _is_text(place: Location) -> bool:
    """Whether the schema expects text at ``place``."""
    parts, annotation = _walk(place)
    return len(parts) == len(place) and _has_text(annotation)


def _has_text(annotation: object) -> bool:
    if typing.get_origin(annotation) is dict:
        return False
    return annotation is str or any(_has_text(part) for part in typing.get_args(annotation))


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
            return f"{key}: got {detail['input']!r}; expected a section with indented keys"
        case _:
            return f"{key}: got {detail['input']!r}; {detail['msg'][0].lower()}{detail['msg'][1:]}"
