"""The version of a judge: a digest of everything that its rewards depend on."""

import functools
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rft_platform import __version__
from rft_platform.common.code_snapshot import source_of
from rft_platform.common.files import digest_json
from rft_platform.common.user_code import module_elsewhere


def judge_version(parts: Sequence[tuple[str, Callable[..., Any], dict[str, Any], float]]) -> str:
    """Version of a weighted sum of judges, each given as name, function, arguments and weight: 16 hex digits.

    The version depends on the names, arguments and weights, on the platform's version, and on the source code of the
    functions and, recursively, of everything that they use from their own top-level package.
    """
    described = [
        {"name": name, "args": args, "weight": weight, "source": used_source(function)}
        for name, function, args, weight in parts
    ]
    return digest_json({"parts": described, "package": __version__})[:16]


def used_source(function: Callable[..., Any]) -> dict[str, str]:
    """Source code of a function, and of the functions, classes and plain values of its package that it uses.

    For a callable object, or for the object of a bound method, the result includes the object's attributes and all
    methods of its class; for ``functools.partial`` it includes the bound arguments. Plain values are included as
    values, other objects as their class and the source of the class. If an object has a method ``identity()``, the
    return value of that method is included instead of the object's attributes.
    """
    sources: dict[str, str] = {}
    target: Any = function
    while isinstance(target, functools.partial) or hasattr(target, "__wrapped__"):
        if isinstance(target, functools.partial):
            sources[f"bound {len(sources)}"] = _described(
                [target.args, target.keywords], _package(target.func), sources
            )
        target = getattr(target, "func" if isinstance(target, functools.partial) else "__wrapped__")
    owner = target.__self__ if isinstance(target, types.MethodType) else target
    if not isinstance(target, types.FunctionType | types.BuiltinFunctionType | type) and not isinstance(owner, type):
        if not hasattr(owner, "identity"):
            attributes = getattr(owner, "__dict__", {})
            sources["state"] = _described(attributes, _package(type(owner)), sources)
        if owner is target:
            target = type(target).__call__
        for method in _own_methods(type(owner)):
            _collect(method, sources)
    _collect(target, sources)
    return sources


def _own_methods(kind: type) -> Iterator[types.FunctionType]:
    """Methods that are defined in a class and in its bases of the same package; generated methods are left out."""
    for base in kind.__mro__:
        if _package(base) != _package(kind):
            continue
        for member in vars(base).values():
            function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            if isinstance(function, types.FunctionType) and function.__qualname__.startswith(base.__qualname__):
                yield function


def _described(value: Any, package: str, sources: dict[str, str], depth: int = 8) -> str:
    """Text of any value, the same in every process.

    Adds the source of the functions and classes of ``package`` that the value contains to ``sources``.
    """
    plain = _plain(value)
    if plain is not None:
        return plain
    if depth and isinstance(value, dict | list | tuple | set | frozenset):
        items = list(value.items()) if isinstance(value, dict) else value
        told = [_described(item, package, sources, depth - 1) for item in items]
        return f"[{', '.join(told if isinstance(value, list | tuple) else sorted(told))}]"
    if isinstance(value, functools.partial):
        return _described([value.func, value.args, value.keywords], package, sources, depth - 1) if depth else "partial"
    named = value if isinstance(value, types.FunctionType | types.MethodType | type) else type(value)
    if _package(named) == package:
        _collect(named, sources)
    return _name_of(named)


def _name_of(value: Any) -> str:
    """Module and qualified name of a function or class, the same in every process."""
    return f"{module_elsewhere(str(getattr(value, '__module__', '')))}.{getattr(value, '__qualname__', '')}"


def _collect(value: Any, sources: dict[str, str]) -> None:
    name = _name_of(value)
    if name in sources:
        return
    sources[name] = _source(value)
    function = value.__func__ if isinstance(value, types.MethodType) else value
    if not isinstance(function, types.FunctionType):
        return
    for inner_name, inner in _referenced(function):
        plain = _plain(inner)
        if plain is not None:
            sources[f"{name}:{inner_name}"] = plain
        elif callable(inner) and _package(inner) == _package(function):
            _collect(inner, sources)


def _referenced(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Values from global and enclosing scopes that a function uses, and members of its package's modules."""
    names = sorted(set(_code_names(function.__code__)))
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] == _package(function):
            yield from ((member, getattr(value, member)) for member in names if hasattr(value, member))
        elif name in function.__globals__:
            yield name, value
    yield from zip(function.__code__.co_freevars, _cell_values(function), strict=True)


def _cell_values(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            yield None


def _code_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_names(constant)


def _source(value: Any) -> str:
    try:
        return source_of(value)
    except (OSError, TypeError):  # no source file: defined in an interactive shell, or built in
        code = getattr(value, "__code__", None)
        return "" if code is None else f"{code.co_code.hex()} {code.co_names!r}"


def _plain(value: Any) -> str | None:
    """Stable text of a number, string, pattern or collection of these; None for any other value."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, re.Pattern):
        return f"{value.pattern!r} {value.flags}"
    if isinstance(value, dict):
        value = list(value.items())
    elif isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if not isinstance(value, list | tuple):
        return None
    items = [_plain(item) for item in value]
    return None if None in items else f"[{', '.join(item for item in items if item)}]"


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]
