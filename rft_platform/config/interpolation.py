"""Interpolation in configuration files: ``${oc.env:NAME,default}`` and ``${section.key}``, by OmegaConf.

A user's file is interpolated when it is read. The copy that a project stores contains values instead of expressions, so
that a later process with another environment reads the same settings. The copy writes a literal ``${`` as ``\\${``.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from rft_platform.common.errors import UserError

Place = tuple[Any, ...]  # keys and indices
Read = Callable[[Place, str], Any]

_MARK = "${"
_VARIABLE = re.compile(r"Environment variable '(?P<name>[^']*)' not found")
_LITERAL = re.compile(r"(?<!\\)(\\*+)\$\{")
_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\\$\{")
_ENVIRONMENT = re.compile(r"""(?<!\\)(?:\\\\)*\$\{\s*oc\.env\s*:\s*['"]?(?P<name>\w+)""")
#: Names of variables that hold secrets; MAX_TOKEN_LEN is none.
_SECRET = re.compile(r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(?:KEY|TOKEN)(?:_?\d+)?$", re.IGNORECASE)
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
            if _SECRET.search(found["name"]):
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
