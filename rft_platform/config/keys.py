"""Find the known key that a misspelt key probably means."""

import difflib
import types
import typing
from collections.abc import Iterable, Iterator

from pydantic import AliasChoices, BaseModel

from rft_platform.config.schema import RftConfig

Location = tuple[int | str, ...]


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
    _, section = _walk(parents)
    if section is not None:
        similar = difflib.get_close_matches(str(last), list(_names(section)), n=3, cutoff=0.6)
        similar.sort(key=lambda name: sorted(name) != sorted(str(last)))  # first those with swapped letters
        if similar:
            return dotted((*parents, similar[0]), unknown=True)
    elsewhere: dict[str, str] = {}
    for path in sorted(_paths(RftConfig), key=lambda path: path.count(".")):
        elsewhere.setdefault(path.rpartition(".")[2], path)
    similar = difflib.get_close_matches(str(last), elsewhere, n=1, cutoff=0.8)
    return elsewhere[similar[0]] if similar else None


def _walk(location: Iterable[int | str]) -> tuple[list[int | str], type[BaseModel] | None]:
    """The location without the union tags that pydantic inserts, and the section that it leads to (None: a value)."""
    section: type[BaseModel] | None = RftConfig
    parts: list[int | str] = []
    for part in location:
        field = section.model_fields.get(str(part)) if section is not None else None
        if isinstance(part, int) or field is not None:
            parts.append(part)
        if field is not None:
            section = next(_models_in(field.annotation), None)
    return parts, section


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


def _names(section: type[BaseModel]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield name
        if isinstance(field.validation_alias, AliasChoices):
            yield from (choice for choice in field.validation_alias.choices if isinstance(choice, str))


def _paths(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in _models_in(field.annotation):
            yield from _paths(inner, f"{prefix}{name}.")
