"""Write docs/configuration.md: every key of rft.yaml with its type, default, constraints and meaning, from the schema.

``make configuration`` runs this. A test fails where the page is older than the schema, or a key has no description.
"""

import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rft_platform.config.foreign.keys import KEYS
from rft_platform.config.foreign.names import REFUSED_REWARDS, REFUSED_WORKFLOWS, REWARDS, WORKFLOWS, Judge
from rft_platform.config.foreign.treatments import Moved, Noted, Treatment
from rft_platform.config.schema.rft_config import RftConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEADER = """# Configuration reference

This page lists every key of `rft.yaml`. `make configuration` generates it from the schema: do not edit this page. An
unknown key is refused, and the error names the most similar known key. `rft run --config rft.yaml --dry-run` shows the
settings that result from a file.

A value may contain `${oc.env:NAME,DEFAULT}`, an environment variable with an optional default, and `${section.key}`,
the value of another key of the file ([OmegaConf](https://omegaconf.readthedocs.io)). An expression without a value is
refused. The project stores the values: a later change of a variable does not change a started project. So a variable
whose name ends with `KEY` or `TOKEN`, or contains `SECRET` or `PASSWORD`, is refused: read it in your code, or name it
in `api_key_env`.
"""
FOREIGN = """
## Files of Trinity-RFT

A configuration file of Trinity-RFT loads as it is. Keys that are not listed above are renamed, or accepted with one
line in the plan that says what takes their place, or refused with the reason. `[]` stands for each entry of a list; the
keys of `taskset` hold for `tasksets[]` and `eval_tasksets[]`, too.

`stages` of one supervised fine-tuning and one training after it are one project: the first is its `warm_start`.
A file for Tinker trains a LoRA adapter on this machine. For `on_policy_distill` and `jsd` (here `gkd`), the first of
`explorer.auxiliary_models` is the teacher; for `mix`, the auxiliary buffer holds the demonstrations
(`algorithm.experts`).

| key | here |
|---|---|
"""
_REPEATED = ("buffer.explorer_input.tasksets[]", "buffer.explorer_input.eval_tasksets[]", "buffer.eval_tasksets[]")
_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any value", dict: "mapping"}
_BOUNDS = {Ge: ("ge", "≥ {}"), Gt: ("gt", "> {}"), Le: ("le", "≤ {}"), Lt: ("lt", "< {}")}
_LENGTHS = {MinLen: ("min_length", "at least {} long"), MaxLen: ("max_length", "at most {} long")}


def page() -> str:
    """The text of the page."""
    return HEADER + "".join(_section("", RftConfig, "", {})) + "".join(_foreign())


def _foreign() -> Iterator[str]:
    """The keys, workflows and rewards of Trinity-RFT's files."""
    yield FOREIGN
    for key, treatment in KEYS:
        if not key.startswith(_REPEATED):
            yield f"| {key} | {_cell(_treated(treatment))} |\n"
    yield "\n### Workflows and rewards\n\n| Trinity-RFT | here |\n|---|---|\n"
    for name, known in WORKFLOWS.items():
        yield f"| `{name}` | `workflow: {known.workflow}`{_judged(known.judge)} |\n"
    for name, judge in REWARDS.items():
        yield f"| `{name}` | {_judged(judge).removeprefix(', ')} |\n"
    for name, reason in {**REFUSED_WORKFLOWS, **REFUSED_REWARDS}.items():
        yield f"| `{name}` | refused: {_cell(reason)} |\n"


def _treated(treatment: Treatment) -> str:
    if isinstance(treatment, Moved):
        same = not treatment.to.strip(".") or (treatment.to.startswith(".") and treatment.values)
        return "some values have other names" if same else f"`{treatment.to.removeprefix('.')}`"
    return f"no effect: {treatment.reason}" if isinstance(treatment, Noted) else f"refused: {treatment.reason}"


def _judged(judge: Judge | None) -> str:
    if judge is None:
        return ""
    if isinstance(judge, str):
        return f", `judge: {judge}`"
    return ", judges " + " + ".join(f"{part['weight']:g} `{part['judge']}`" for part in judge)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def undocumented() -> list[str]:
    """Keys without a description; sections are described by their class."""
    return [key for key, field in keys() if not field.description and not list(_sections(field.annotation))]


def keys(prefix: str = "", section: type[BaseModel] = RftConfig) -> Iterator[tuple[str, FieldInfo]]:
    """Every key with its field, in the order of the schema; ``[]`` marks the entries of a list."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{_written(name, field)}"
        yield key, field
        for inner in _sections(field.annotation):
            yield from keys(f"{key}{'[]' if _is_list(field.annotation) else ''}.", inner)


def _section(key: str, section: type[BaseModel], meaning: str, written_as: dict[type[BaseModel], str]) -> Iterator[str]:
    """The heading and table of a section, and those of the sections in it; keys of a known section are not repeated."""
    inner = [(name, field, list(_sections(field.annotation))) for name, field in section.model_fields.items()]
    plain = [(name, field) for name, field, sections in inner if not sections]
    if key:
        yield f"\n## `{key}`\n\n{_text(meaning or section.__doc__ or '')}\n"
    if section in written_as:
        yield f"\nThe keys are those of `{written_as[section]}`.\n"
        return
    written_as[section] = key
    if plain:
        yield "\n| key | type | default | meaning |\n|---|---|---|---|\n"
        for name, field in plain:
            cells = (_type(field), _default(field), _text(field.description or ""))
            yield f"| `{_written(name, field)}` | {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
    for name, field, sections in inner:
        written = f"{key}.{_written(name, field)}".lstrip(".") + ("[]" if _is_list(field.annotation) else "")
        for each in sections:
            yield from _section(written, each, field.description or "", written_as)


def _written(name: str, field: FieldInfo) -> str:
    """The key as users write it; the first alias where the name is one of Python's alone."""
    alias = field.validation_alias
    if isinstance(alias, AliasChoices):
        texts = [choice for choice in alias.choices if isinstance(choice, str)]
        return name if name in texts or not texts else texts[0]
    return alias if isinstance(alias, str) else name


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a key holds: itself, one that may be missing, or those of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) is not Literal:
        seen: set[type[BaseModel]] = set()
        for part in typing.get_args(annotation):
            for found in _sections(part):
                if found not in seen:
                    seen.add(found)
                    yield found


def _is_list(annotation: Any) -> bool:
    if typing.get_origin(annotation) is list:
        return True
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return union and any(_is_list(part) for part in typing.get_args(annotation))


def _type(field: FieldInfo) -> str:
    bounds = [
        form.format(_number(getattr(item, attribute)))
        for item in field.metadata
        for kind, (attribute, form) in {**_BOUNDS, **_LENGTHS}.items()
        if isinstance(item, kind)
    ]
    return ", ".join([_kind(field.annotation), *bounds])


def _kind(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        bounds = [
            form.format(_number(getattr(item, attribute)))
            for item in parts[1:]
            for kind, (attribute, form) in _BOUNDS.items()
            if isinstance(item, kind)
        ]
        return " ".join([_kind(parts[0]), *bounds])
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys("null" if part is type(None) else _kind(part) for part in parts))
    if origin in (list, tuple):
        return f"list of {_kind(parts[0])}" if origin is list else _tuple(parts)
    if origin is dict:
        return f"mapping to {_kind(parts[1])}"
    return _NAMES.get(annotation) or getattr(annotation, "__name__", str(annotation))


def _tuple(parts: tuple[Any, ...]) -> str:
    """The entries of a list of fixed length, or what a list of any length holds."""
    return f"list of {_kind(parts[0])}" if parts[1:] == (...,) else f"[{', '.join(map(_kind, parts))}]"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        value: Any = field.default_factory()  # type: ignore[call-arg]
    elif field.default is PydanticUndefined:
        return "required"
    else:
        value = field.default
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list | tuple):
        return f"`{[*value]}`" if value else "`[]`"
    if isinstance(value, float | int):
        return f"`{_number(value)}`"
    return f'`"{value}"`' if value in ("", " ") else f"`{value}`"


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _text(description: str) -> str:
    """One line of Markdown: the code marks of docstrings become those of Markdown."""
    return re.sub(r"\s+", " ", description.replace("``", "`")).strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for missing in undocumented():
        print(f"{missing}: no description")
