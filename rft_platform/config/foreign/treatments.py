"""The three treatments of a foreign key (``Moved``, ``Noted``, ``Refused``), and code that finds keys in a file."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rft_platform.common.errors import UserError

Data = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Moved:
    """The setting has another key in our schema; the value is written there."""

    to: str  # dotted key; if it begins with a dot, it is relative to the section of the foreign key
    values: Mapping[Any, Any] = field(default_factory=dict)  # values with another name here; None: leave the key out


@dataclass(frozen=True, slots=True)
class Noted:
    """The key is accepted without effect; ``reason`` says what the platform does instead."""

    reason: str
    silent: tuple[Any, ...] = ()  # values that equal the platform's behaviour: no line is printed


@dataclass(frozen=True, slots=True)
class Refused:
    """The platform does not support the key; ``reason`` says what to do instead."""

    reason: str
    allowed: tuple[Any, ...] = ()  # values, besides null, that request nothing: they are accepted
    secret: bool = False  # True: the message does not show the value


Treatment = Moved | Noted | Refused


@dataclass(frozen=True, slots=True)
class Found:
    """A key of the table in a file."""

    section: Data  # the mapping that contains the key
    name: str  # the key's last part
    shown: str  # the whole key as the user would write it

    def value(self) -> Any:
        """Remove the key from its section and return its value."""
        return self.section.pop(self.name)


def find(data: Data, key: str) -> list[Found]:
    """Every place of ``data`` that the dotted ``key`` names; ``[]`` after a part stands for each entry of a list."""
    *parents, last = key.split(".")
    return [Found(section, last, shown + last) for section, shown in _sections(data, parents, "") if last in section]


def _sections(node: Any, parents: list[str], shown: str) -> Iterator[tuple[Data, str]]:
    if not isinstance(node, dict):
        return
    if not parents:
        yield node, shown
        return
    first, *rest = parents
    if first.endswith("[]"):
        name = first.removesuffix("[]")
        entries = node.get(name)
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            yield from _sections(entry, rest, f"{shown}{name}[{index}].")
    else:
        yield from _sections(node.get(first), rest, f"{shown}{first}.")


def apply(data: Data, key: str, treatment: Treatment) -> Iterator[str]:
    """Apply ``treatment`` wherever ``key`` is set; yields one line for each key without effect. Raises UserError."""
    for found in find(data, key):
        value = found.value()
        if isinstance(treatment, Moved):
            _move(data, found, treatment, value)
        elif isinstance(treatment, Noted):
            if _asks(value) and not _is_one_of(value, treatment.silent):
                yield f"{found.shown} has no effect here: {treatment.reason}"
        elif _asks(value) and not _is_one_of(value, treatment.allowed):
            raise UserError(f"{found.shown}{'' if treatment.secret else f' {_short(value)}'}: {treatment.reason}")


def _move(data: Data, found: Found, treatment: Moved, value: Any) -> None:
    value = next((name for known, name in treatment.values.items() if _is_one_of(value, (known,))), value)
    if not _asks(value):
        return
    beside = treatment.to.startswith(".")
    target = treatment.to.removeprefix(".")
    shown = found.shown.removesuffix(found.name) + target if beside else target
    put(found.section if beside else data, target, value, f"{found.shown} and {shown}")


def put(section: Data, key: str, value: Any, both: str) -> None:
    """Set a dotted key. Raises UserError if the key already has another value.

    ``both``: text for the message that names the two keys of this setting.
    """
    *parents, last = key.split(".")
    for name in parents:
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):  # the validation refuses it
            return
    if section.get(last) is None:
        section[last] = value
    elif section[last] != value:
        values = f"{_short(repr(value))} and {_short(repr(section[last]))}"
        raise UserError(f"{both} are the same setting, with the values {values}: give one")


def mapping_at(data: Any, key: str) -> Data:
    """The mapping at a dotted key; a new, empty one if there is none."""
    value = value_at(data, key)
    return value if isinstance(value, dict) else {}


def value_at(data: Any, key: str) -> Any:
    """The value of a dotted key; None if it is not set."""
    for name in key.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _asks(value: Any) -> bool:
    return value is not None and value not in ({}, [])


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(known) and value == known for known in values)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
