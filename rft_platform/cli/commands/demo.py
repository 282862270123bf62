"""``rft new``, ``rft demo`` and ``rft recipe``: projects and complete trainings without any preparation."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rft_platform.config.home import Home
    from rft_platform.config.schema.rft_config import RftConfig
    from rft_platform.recipes.recipe import Recipe
    from rft_platform.rounds.project.project import Project

#: Environment with vLLM that ``make vllm-cpu`` creates.
VLLM_PYTHON = Path(".venv-vllm/bin/python")

Seed = Annotated[int | None, typer.Option(min=0, help="Seed of the whole run.", show_default=False)]
Fresh = Annotated[bool, typer.Option("--fresh", help="Rename the folder of an earlier project and start a new one.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Number of rounds; default: the recipe's.", show_default=False)]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write the results to this JSON file.", show_default=False)
]
Engine = Annotated[
    str | None,
    typer.Option(help="transformers or vllm; default: the best one that is installed.", show_default=False),
]


def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The new folder.", show_default=False)],
    recipe: Annotated[str, typer.Option(help="Recipe that it starts from; see docs/recipes.md.")] = "arithmetic",
) -> None:
    """Write a project that you own and change: configuration, code, and a script that makes model and tasks."""
    from rft_platform.recipes.recipe import recipe_named
    from rft_platform.run.console import output, writing

    with writing(folder):
        recipe_named(recipe).write(folder)
    output().print(f"{folder}: read README.md there first", markup=False, soft_wrap=True)


def demo(
    seed: Seed = None, fresh: Fresh = False, rounds: Rounds = None, json_file: JsonFile = None, engine: Engine = None
) -> None:
    """Teach a tiny model arithmetic: generated data, a warm start, then GRPO rounds. Takes minutes on two cores."""
    from rft_platform.cli.views.demo_summary import print_summary, summary_of, write_summary
    from rft_platform.recipes.recipe import recipe_named
    from rft_platform.run.console import output
    from rft_platform.run.next_steps import print_next_steps

    project = train(recipe_named("arithmetic"), "demo", seed, fresh, rounds, json_file, engine)
    summary = summary_of(project)
    print_summary(summary, output())
    print_next_steps(project, output(), summary.model_version, summary.checkpoint)
    if json_file is not None:
        write_summary(summary, json_file)


def recipe(
    name: Annotated[str | None, typer.Argument(help="Name of the recipe; none: list them.", show_default=False)] = None,
    seed: Seed = None,
    fresh: Fresh = False,
    rounds: Rounds = None,
    json_file: JsonFile = None,
    engine: Engine = None,
) -> None:
    """Train an agent from scratch by a recipe, and report what it learned: figures, curves, transcripts."""
    from rft_platform.cli.views.demo_summary import print_recipes, print_report, write_report
    from rft_platform.recipes.recipe import recipe_named
    from rft_platform.run.console import output

    if name is None:
        print_recipes(output())
        return
    found = recipe_named(name, trained=True)
    project = train(found, f"recipe {name}", seed, fresh, rounds, json_file, engine)
    report = write_report(project, found, json_file)
    if report is not None:
        print_report(report, found, project, output())


def train(
    recipe: "Recipe",
    command: str,
    seed: int | None,
    fresh: bool,
    rounds: int | None,
    json_file: Path | None,
    engine: str | None,
) -> "Project":
    """Train the recipe's project in ``RFT_HOME`` to its last round, or continue it; ``command`` continues it again.

    The stages of the recipe are trained first.
    """
    from rft_platform.cluster.this_process import terminable
    from rft_platform.common.progress import announce
    from rft_platform.config.home import Home
    from rft_platform.config.load import load_config
    from rft_platform.online.project import open_project
    from rft_platform.run.checks import check_run
    from rft_platform.run.console import notes, refuse_bad_target
    from rft_platform.run.live import showing_progress
    from rft_platform.run.next_steps import rft_command_with
    from rft_platform.run.project_checks import check_room, check_writable, is_finished
    from rft_platform.run.start import drive_project, use_home, with_rounds, write_config

    home, console = Home.from_environment(), notes()
    again = rft_command_with(home, command, seed=seed, rounds=rounds, engine=engine, json=json_file)
    use_home(home)
    refuse_bad_target(json_file)
    check_writable(home)
    if fresh or not home.config_file.exists():
        check_room(home.root)
    if fresh and (moved := move_aside(home)):
        console.print(f"the earlier project is now in {moved}", markup=False, soft_wrap=True)
    with showing_progress(console):
        seed = prepare(home, recipe, command, seed)
    with terminable(), _naming_what_continues(again):
        train_stages(home, recipe, seed, engine)
    config = with_seed(load_config(home.root / recipe.name / "rft.yaml"), seed)  # it names the last stage's checkpoint
    config = with_rounds(with_engine(config, engine), rounds)
    with showing_progress(console):
        announce("checking settings, data and this machine")
        check_run(home, config)
    write_config(home, config)
    project = open_project(home)
    if is_finished(project):
        message = f"This project is complete. `{again} --fresh` renames its folder and starts a new one."
        console.print(message, markup=False, soft_wrap=True)
        return project
    console.print(_opening(project), markup=False, soft_wrap=True)
    with _naming_what_continues(again):
        drive_project(project, console)
    return project


@contextmanager
def _naming_what_continues(again: str) -> Iterator[None]:
    """Print the command that continues the project if the block is interrupted."""
    from rft_platform.run.console import notes

    try:
        yield
    except KeyboardInterrupt:
        message = f"interrupted: `{again}` continues this project, `{again} --fresh` starts a new one"
        notes().print(message, markup=False, soft_wrap=True)
        raise


def train_stages(home: "Home", recipe: "Recipe", seed: int | None, engine: str | None) -> None:
    """Train each stage in a separate process and home; a complete stage is left as it is."""
    import os
    import sys

    from rft_platform.cluster.local.processes import run_in_foreground
    from rft_platform.common.errors import UserError
    from rft_platform.config.home import Home
    from rft_platform.config.load import load_config
    from rft_platform.online.project import open_project
    from rft_platform.run.console import notes
    from rft_platform.run.project_checks import is_finished
    from rft_platform.run.start import write_config

    for stage in recipe.stages:
        root = recipe.stage_home(home.root, stage)
        own = Home(root)
        if own.config_file.exists() and is_finished(open_project(own)):
            continue
        config = with_seed(load_config(home.root / recipe.name / f"{stage}.yaml"), seed)
        write_config(own, with_engine(config, engine))
        notes().print(f"stage {stage} of {recipe.name}: {root}", markup=False, soft_wrap=True)
        command = [sys.executable, "-m", "rft_platform", "run", "--config", str(own.config_file)]
        if code := run_in_foreground(command, {**os.environ, "RFT_HOME": str(root)}):
            raise UserError(f"stage {stage} ended with code {code}: correct the cause, then run the command again")


def prepare(home: "Home", recipe: "Recipe", command: str, seed: int | None) -> int | None:
    """Write the recipe's project into the home on first use; returns the seed in force. None: that of the files.

    An existing project keeps its seed; that of the first stage exists before the recipe's own.
    """
    from rft_platform.common.errors import UserError
    from rft_platform.common.progress import announce
    from rft_platform.config.home import Home
    from rft_platform.config.load import load_config_of

    folder = home.root / recipe.name
    in_force = load_config_of(home) if home.config_file.exists() else None
    if in_force is not None and not folder.exists():
        raise UserError(
            f"{home.root} holds the project {in_force.project}/{in_force.name}: point RFT_HOME at another folder, or "
            f"run `rft {command} --fresh`, which renames {home.root}"
        )
    if in_force is None:
        stages = (Home(recipe.stage_home(home.root, stage)) for stage in recipe.stages)
        in_force = next((load_config_of(stage) for stage in stages if stage.config_file.exists()), None)
    if in_force is not None and seed not in (None, in_force.seed):
        raise UserError(
            f"--seed {seed}: the project in {home.root} has seed {in_force.seed}; leave it out to continue, or add "
            "--fresh"
        )
    if not folder.exists():
        announce(f"making model and tasks of the recipe {recipe.name}")
        recipe.write(folder)
    return seed if in_force is None else in_force.seed


def with_seed(config: "RftConfig", seed: int | None) -> "RftConfig":
    """The configuration with ``seed``; unchanged if None."""
    return config if seed is None else config.model_copy(update={"seed": seed})


def with_engine(config: "RftConfig", kind: str | None) -> "RftConfig":
    """The configuration with engine ``kind``; unchanged if None. Raises UserError if ``kind`` is unknown or missing."""
    import os
    import sys

    from rft_platform.common.errors import UserError
    from rft_platform.config.engine_choice import PYTHON_VARIABLE, installed_in
    from rft_platform.inference.vllm_engine.versions import required_in

    if kind is None:
        return config
    if kind not in ("transformers", "vllm"):
        raise UserError(f"--engine {kind}: expected transformers or vllm")
    python = os.environ.get(PYTHON_VARIABLE) or config.engine.python
    if kind == "vllm":
        if python is None and VLLM_PYTHON.exists() and installed_in(sys.executable) is None:
            python = str(VLLM_PYTHON.absolute())
        required_in(python or sys.executable)
    return config.model_copy(update={"engine": config.engine.model_copy(update={"kind": kind, "python": python})})


def move_aside(home: "Home") -> Path | None:
    """Rename the project's folder to ``<home>.<time>`` and return the new name; None if there is no folder."""
    from rft_platform.common.errors import UserError
    from rft_platform.jobs.driver_lock import refuse_if_used
    from rft_platform.recipes.recipe import recipes

    if not home.root.exists():
        return None
    known = home.config_file.exists() or any((home.root / name).exists() for name in recipes())
    if not known and any(home.root.iterdir()):
        raise UserError(f"RFT_HOME {home.root} is not a project, so --fresh does not rename it: choose another folder")
    refuse_if_used(home)
    home.cluster.stop_all()
    return home.root.rename(home.root.with_name(f"{home.root.name}.{time.strftime('%Y%m%d-%H%M%S')}"))


def _opening(project: "Project") -> str:
    from rft_platform.servers.next_launches import what_is_next

    if not project.store.rounds():
        return f"{project.rounds_budget} rounds start in {project.home.root}"
    return f"The project continues in {project.home.root}; {'; '.join(what_is_next(project))}"
