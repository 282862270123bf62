"""``rft config explain | show | convert | schema``: the meaning of a key, resolved settings, files of other systems."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from rft_platform.config.foreign.treatments import Treatment

config = typer.Typer(no_args_is_help=True, help="Explain keys of rft.yaml, show resolved settings, convert files.")


@config.command()
def explain(key: Annotated[str, typer.Argument(help="A key or a section, such as model.temperature.")]) -> None:
    """Explain a key of rft.yaml: type, default and meaning; or list the keys of a section."""
    import re

    from rft_platform.common.errors import UserError
    from rft_platform.config.foreign.keys import CONVERTED, KEYS
    from rft_platform.config.load import nearest_key
    from rft_platform.config.reference import keys
    from rft_platform.run.console import output

    wanted, known = re.sub(r"\[\d*\]", "[]", key), dict(keys())
    plain = {name.replace("[]", ""): name for name in known}
    name = wanted if wanted in known else plain.get(wanted.replace("[]", ""))
    if name is None:
        foreign = {**CONVERTED, **{name: _treatment(name, treatment) for name, treatment in KEYS}}
        sections = [section for section in CONVERTED if wanted.startswith(f"{section}.")]
        for name in (wanted, *sections):
            if name in foreign:
                output().print(f"{name} (a key of Trinity-RFT)", style="bold", markup=False)
                output().print(foreign[name], markup=False, soft_wrap=True)
                return
        nearest = nearest_key(tuple(key.split(".")))
        raise UserError(f"unknown key {key}" + (f"; did you mean {nearest}?" if nearest else ""))
    _print_key(name, known)


@config.command()
def show(
    file: Annotated[
        Path | None, typer.Option("--config", "-c", help="A YAML file; default: the project in RFT_HOME.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also the keys with their default value.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every key.")] = False,
) -> None:
    """Show the settings in force: the keys that differ from the default, and what follows from them."""
    from dataclasses import asdict

    from rft_platform.config.allowed_changes import flat
    from rft_platform.config.home import Home
    from rft_platform.config.load import load_config
    from rft_platform.config.resolve import resolve
    from rft_platform.online.project import open_project
    from rft_platform.run.console import output, print_json, table
    from rft_platform.run.start import use_home

    home = Home.from_environment()
    use_home(home)
    loaded = open_project(home).config if file is None else load_config(file)
    run = resolve(loaded)
    derived = {"algorithm": asdict(run.spec), "batches": asdict(run.batches), "limits": asdict(run.limits)}
    if as_json:
        print_json({"settings": loaded.model_dump(mode="json"), "derived": derived})
        return
    given = loaded.model_dump(mode="json", exclude_defaults=not everything)
    for heading, settings in (("key", given), ("derived", derived)):
        shown = table(heading, "value", left=[heading, "value"], overflow="fold")
        for name, value in flat(settings).items():
            shown.add_row(name, _text(value))
        output().print(shown)


@config.command()
def convert(
    file: Annotated[Path, typer.Argument(help="A YAML or JSON file of Trinity-RFT, or TRL's GRPOConfig.")],
    to: Annotated[Path | None, typer.Option("--to", help="Write the result to this file; default: print it.")] = None,
) -> None:
    """Convert a configuration of Trinity-RFT or TRL; prints one line for each setting that has no equal here."""
    import yaml

    from rft_platform.common.errors import UserError
    from rft_platform.config.foreign.defaults import convert_with_defaults
    from rft_platform.config.foreign.trl import convert_trl, is_trl
    from rft_platform.config.load import build_config, read_yaml
    from rft_platform.config.reference import write_with_schema
    from rft_platform.config.schema.rft_config import RftConfig
    from rft_platform.run.console import notes, writing

    if to is not None and to.exists():
        raise UserError(f"--to {to}: the file exists; name another one, or remove it first")
    data = read_yaml(file)
    if not (is_trl(data) or data.keys() & {*RftConfig.model_fields, "stages"}):
        raise UserError(f"{file}: no configuration of Trinity-RFT or of TRL's GRPO trainer (GRPOConfig)")
    settings, notices = (convert_trl if is_trl(data) else convert_with_defaults)(data, str(file))
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    if to is None:
        typer.echo(text, nl=False)
    else:
        with writing(to):
            write_with_schema(to, text)
    for line in notices:
        notes().print(f"note: {line}", markup=False, soft_wrap=True)
    try:
        build_config(settings, "missing or invalid")
    except UserError as error:
        notes().print(str(error), style="yellow", markup=False, soft_wrap=True)


@config.command()
def schema(
    to: Annotated[Path | None, typer.Option("--to", help="Write the schema to this file; default: print it.")] = None,
) -> None:
    """Print the JSON schema of rft.yaml, with which an editor completes keys and marks errors."""
    import json

    from rft_platform.common.files import write_text
    from rft_platform.config.reference import json_schema
    from rft_platform.run.console import writing

    text = json.dumps(json_schema(), indent=1)
    if to is None:
        typer.echo(text)
    else:
        with writing(to):
            write_text(to, f"{text}\n")


def _print_key(name: str, known: "Mapping[str, FieldInfo]") -> None:
    from rft_platform.config.reference import default_of, one_line, sections_of, type_of
    from rft_platform.run.console import output, table

    field, console = known[name], output()
    sections = list(sections_of(field.annotation))
    console.print(name, style="bold", markup=False)
    meaning = one_line(field.description or "") or one_line(sections[0].__doc__ or "")
    console.print(f"  {meaning}", markup=False, soft_wrap=True)
    if not sections:
        console.print(f"  type:    {_plain(type_of(field))}", markup=False, soft_wrap=True)
        console.print(f"  default: {_plain(default_of(field))}", markup=False, soft_wrap=True)
        return
    columns = ("key", "type", "default")
    shown = table(*columns, left=columns, overflow="fold")
    for inner, its_field in known.items():
        parent, _, last = inner.rpartition(".")
        if parent in (name, f"{name}[]"):
            nested = any(sections_of(its_field.annotation))
            shown.add_row(
                last,
                "section" if nested else _plain(type_of(its_field)),
                "" if nested else _plain(default_of(its_field)),
            )
    console.print(shown)


def _treatment(key: str, treatment: "Treatment") -> str:
    from rft_platform.config.foreign.treatments import Moved, Noted

    if isinstance(treatment, Moved):
        section = key.rpartition(".")[0] if treatment.to.startswith(".") else ""
        return f"is read as {section}{treatment.to}"
    return f"{'has no effect' if isinstance(treatment, Noted) else 'is refused'}: {treatment.reason}"


def _text(value: Any) -> str:
    import json

    from rich.markup import escape

    return escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def _plain(markdown: str) -> str:
    from rich.markup import escape

    return escape(markdown.replace("`", ""))
