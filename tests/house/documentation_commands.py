"""The commands in shell blocks, and a check that the programs of this repository accept them."""

import importlib.util
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import yaml

from rft_platform.cli.main import app
from tests.house.documentation_blocks import BLOCKS, REPOSITORY, Block

#: Programs of others, whose arguments are not checked here.
OTHERS = {
    "bash", "cd", "cp", "curl", "dg", "echo", "export", "git", "kubectl", "mkdir", "mlflow", "ray", "sky", "source",
    "srun", "tensorboard", "uv", "uvx",
}  # fmt: skip
_BETWEEN = {"&&", "||", "|", "|&", ";", "&"}
#: A line that is a command, where blocks without a language show output.
COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:rft|make|python|pip|uvx?|docker|curl|mlflow|tensorboard|dg|export) \S")


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each command, without assignments before it. Raises ValueError for an unclosed quote."""
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word not in _BETWEEN:
                words.append(word)
                continue
            while words and re.match(r"^[A-Z_]+=", words[0]):
                words = words[1:]
            if words:
                yield words
            words = []


def problem_of(words: list[str], block: Block) -> str | None:
    """Why a command of the block would be refused; None if it would not, or if the program is not checked."""
    program, arguments = Path(words[0]).name, words[1:]
    match program:
        case "rft":
            return _refused_by_rft(arguments)
        case "python" if arguments[:1] == ["-m"]:
            return _refused_by_module(arguments[1], arguments[2:])
        case "python":
            titles = {each.title for each in BLOCKS if each.page == block.page}
            known = arguments[0] in titles or arguments[0].startswith("my_") or (REPOSITORY / arguments[0]).is_file()
            return None if known else f"no block of the page is the file {arguments[0]}"
        case "make":
            makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
            targets = [word for word in arguments if "=" not in word]
            unknown = [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)]
            return f"the Makefile has no target {', '.join(unknown)}" if unknown else None
        case "pip":
            return _unknown_extra(arguments)
        case "docker" if arguments[0] == "build":
            file = arguments[arguments.index("--file") + 1]
            return (
                None if (REPOSITORY / file).is_file() and (REPOSITORY / arguments[-1]).is_dir() else f"no file {file}"
            )
        case "docker":
            return _refused_by_compose(arguments)
    return None if program in OTHERS else f"no rule for the program {program}: add it to OTHERS, or a check of it"


def syntax_error(block: Block) -> str:
    """What a shell says of the block's syntax; empty: nothing."""
    return subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True).stderr


def _refused_by_rft(arguments: list[str]) -> str | None:
    """The error of the real command line for these arguments; nothing is run."""
    command: Any = typer.main.get_command(app)
    context, rest = None, arguments
    try:
        while True:
            context = command.make_context("rft", list(rest), parent=context)
            if not hasattr(command, "commands"):
                return None
            _, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    except typer.Exit:  # --version, --help
        return None
    except Exception as error:
        return str(error.format_message() if hasattr(error, "format_message") else error) or type(error).__name__


def _refused_by_module(module: str, arguments: list[str]) -> str | None:
    """A module of this repository must exist, and its code must name each option, or the parameter of Typer for it."""
    if module.partition(".")[0] not in ("rft_platform", "chaos", "scripts"):
        return None
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return f"there is no module {module}"
    own = Path(found.origin)
    program = own.with_name("__main__.py") if own.name == "__init__.py" else own
    code = program.read_text(encoding="utf-8")
    options = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    unknown = [name for name in options if f'"{name}"' not in code and f" {name[2:].replace('-', '_')}: " not in code]
    return f"python -m {module} has no option {', '.join(unknown)}" if unknown else None


def _unknown_extra(arguments: list[str]) -> str | None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"rft-platform\[([\w,-]+)\]", " ".join(arguments))
    unknown = {extra for group in named for extra in group.split(",")} - project["optional-dependencies"].keys()
    return f"the package has no extra {', '.join(sorted(unknown))}" if unknown else None


def _refused_by_compose(arguments: list[str]) -> str | None:
    """Files, profiles and services of ``docker compose`` must exist."""
    given = [arguments[place + 1] for place, word in enumerate(arguments) if word == "-f"]
    if missing := [name for name in given if not (REPOSITORY / name).is_file()]:
        return f"there is no file {', '.join(missing)}"
    services = yaml.safe_load((REPOSITORY / given[0]).read_text(encoding="utf-8"))["services"]
    profiles = {name for service in services.values() for name in service.get("profiles", ())}
    for option, known in (("--profile", profiles), ("exec", services.keys())):
        if option in arguments and arguments[arguments.index(option) + 1] not in known:
            return f"{given[0]}: {option} {arguments[arguments.index(option) + 1]}: expected one of {sorted(known)}"
    return None
