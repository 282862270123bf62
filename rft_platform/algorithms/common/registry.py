"""Registries of functions that the configuration selects by name: one registry per kind."""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from rft_platform.common.errors import UserError

Entry = TypeVar("Entry")
#: A number from 0 to 1.
Share = Annotated[float, Field(ge=0, le=1)]

#: All registries.
REGISTRIES: "list[Registry[Any]]" = []


class Registry(Generic[Entry]):
    """Name -> entry. ``package`` and the modules in it register themselves when a name is first looked up."""

    def __init__(self, kind: str, package: str) -> None:
        self._kind = kind
        self._package = package
        self._entries: dict[str, Entry] = {}
        self._modules: dict[str, str] = {}  # module of each entry
        self._loaded = False
        REGISTRIES.append(self)

    def add(self, name: str, entry: Entry, function: Callable[..., Any]) -> None:
        """Register ``entry``, which describes ``function``, under ``name``. Raises ValueError if the name is taken."""
        module = function.__module__
        known = self._entries if f"{module}.".startswith(f"{self._package}.") else self.names()
        if name in known:
            raise ValueError(f"{self._kind} {name!r} is already registered, by {self._modules[name]}")
        self._entries[name] = entry
        self._modules[name] = module

    def forget(self, module: str) -> None:
        """Remove the entries that ``module`` and the modules below it registered."""
        for name in [name for name, origin in self._modules.items() if f"{origin}.".startswith(f"{module}.")]:
            del self._entries[name], self._modules[name]

    def get(self, name: str) -> Entry:
        """Return the entry called ``name``; otherwise raise UserError with the nearest known name."""
        if name not in self.names():
            raise UserError(unknown_name(self._kind, name, self.names()))
        return self._entries[name]

    def names(self) -> list[str]:
        """All known names, sorted."""
        if not self._loaded:
            package = importlib.import_module(self._package)
            for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{self._package}."):
                importlib.import_module(module.name)
            self._loaded = True  # set after the imports, so that the next look-up repeats an import that failed
        return sorted(self._entries)


def unknown_name(kind: str, given: str, known: Iterable[str]) -> str:
    """Error message for the unknown name ``given``: the nearest known name and all ``known`` names."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {given!r}: {hint}known are {', '.join(names)}"


def check_arguments(
    what: str, function: Callable[..., Any], given: Mapping[str, Any], hidden: Collection[str] = ()
) -> None:
    """Check ``given`` against the keyword-only arguments of ``function``.

    Raises UserError for an unknown name, for a wrong value and if an argument without a default is missing. A value
    must have the annotated type and be inside the annotation's bounds. ``hidden`` are arguments that the platform
    passes, so ``given`` must not contain them.
    """
    parameters = inspect.signature(function).parameters.values()
    known = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in hidden}
    for name in given:
        if name not in known:
            raise UserError(
                unknown_name(f"argument of {what}", name, known) if known else f"{what} takes no argument; got {name!r}"
            )
    needed = [name for name, p in known.items() if p.default is p.empty]
    if not given.keys() >= set(needed):
        raise UserError(f"{what} needs the arguments {', '.join(needed)}; got {', '.join(given) or 'none'}")
    hints = _type_hints(function)
    for name, value in given.items():
        if name in hints:
            _check_type(f"argument {name!r} of {what}", value, hints[name])


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # a user function may name types that do not exist at run time
        return {}


def _check_type(what: str, value: object, hint: Any) -> None:
    """Raise UserError if ``value`` is not of type ``hint``. A list also passes as a tuple, an integer as a float."""
    try:
        TypeAdapter(hint).validate_python(value, strict=not isinstance(value, list))
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise UserError(f"{what} is {value!r}: {reason[0].lower()}{reason[1:]}") from None
