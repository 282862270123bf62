"""Print what the user can do after a run: where the weights are, how to use them, and commands to copy."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.config.home import Home

if TYPE_CHECKING:
    from rich.console import Console

    from rft_platform.rounds.project.project import Project
    from rft_platform.run.round_lines import RoundLine


def rft_command(home: Home) -> str:
    """The command that calls ``rft`` for this home from the current folder, also without an activated environment."""
    found, beside = shutil.which("rft"), Path(sys.executable).with_name("rft")
    if found is not None and Path(found).parent.resolve() == beside.parent.resolve():
        program = "rft"
    elif beside.exists():
        program = shlex.quote(_from_here(beside))
    else:
        program = f"{shlex.quote(_from_here(Path(sys.executable)))} -m rft_platform"
    if home.root == Path(".rft").absolute():
        return program
    return f"RFT_HOME={shlex.quote(_from_here(home.root))} {program}"


def rft_command_with(home: Home, command: str, **options: object) -> str:
    """The command ``rft COMMAND`` with the ``options`` that its user gave; one that is None or False was not given."""
    words = [rft_command(home), command]
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [shlex.quote(str(value))])]
    return " ".join(words)


def model_uri(project: "Project", line: "RoundLine") -> str | None:
    """``models:/NAME/VERSION`` of the policy that a round ended with; None if it is not registered."""
    return None if line.model_version is None else f"models:/{project.model_name}/{line.model_version}"


def print_next_steps(project: "Project", console: "Console", model: str | None, checkpoint: str | None) -> None:
    """Print the commands for looking at the results, and those for using the weights in ``checkpoint``."""
    rft = rft_command(project.home)
    steps = {"inspect every row, checkpoint and score": f"{rft} ui", "list all rounds": f"{rft} rounds"}
    if model is not None:
        steps["trace these weights to their data"] = f"{rft} trace {model}"
    if checkpoint is not None:
        folder = shlex.quote(_from_here(Path(checkpoint)))
        steps["use the weights in Python (transformers)"] = f"AutoModelForCausalLM.from_pretrained({checkpoint!r})"
        steps["serve the weights (vLLM)"] = f"vllm serve {folder}"
    console.print("\nNext", style="bold")
    for what, command in steps.items():
        console.print(f"{what:<40} {command}", markup=False, soft_wrap=True)


def _from_here(path: Path) -> str:
    """The shortest form of the path: relative if it is below the current folder. Symbolic links are kept."""
    here = Path.cwd()
    return os.fspath(path.relative_to(here)) if path.is_relative_to(here) else os.fspath(path)
