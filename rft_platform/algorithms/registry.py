"""Functions chosen by name from the configuration: one registry a kind, one file a function."""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from rft_platform.errors import UserError

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Name -> entry. The modules of ``package`` register themselves when a name is first looked up."""

    def __init__(self, kind: str, package: str) -> None:
        self._kind = kind
        self._package = package
        self._entries: dict[str, Entry] = {}
        self._loaded = False

    def add(self, name: str, entry: Entry) -> None:
        """Make ``entry`` known as ``name``; a name is taken once."""
        if name in self._entries:
            raise ValueError(f"{self._kind} {name!r} is registered twice")
        self._entries[name] = entry

    def get(self, name: str) -> Entry:
        """The entry called ``name``; UserError with the nearest known name otherwise."""
        if name not in self.names():
            raise UserError(unknown_name(self._kind, name, self.names()))
        return self._entries[name]

    def names(self) -> list[str]:
        """All known names, sorted."""
        if not self._loaded:
            self._loaded = True
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__, f"{self._package}."):
                importlib.import_module(module.name)
        return sorted(self._entries)


def unknown_name(kind: str, given: str, known: Iterable[str]) -> str:
    """Message for a name that does not exist."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {given!r}: {hint}known are {', '.join(names)}"


def check_arguments(what: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """UserError when ``given`` names a keyword-only argument that ``function`` does not have."""
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in given:
        if name not in known:
            raise UserError(
                unknown_name(f"argument of {what}", name, known) if known else f"{what} takes no argument; got {name!r}"
            )
