"""``rft eval``: evaluate a policy on the held-out tasks."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from rft_platform.evaluation.comparison import Comparison
    from rft_platform.evaluation.results import EvaluationResult
    from rft_platform.rounds.project.project import Project
    from rft_platform.rounds.project.record import Policy


def evaluate(
    round_number: Annotated[int | None, typer.Option("--round", min=0, help="Evaluate this round's policy.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Evaluate the weights in this folder.")] = None,
    model: Annotated[str | None, typer.Option(help="Evaluate models:/NAME@alias or models:/NAME/3.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Evaluate every policy of the project that has no result yet, oldest first.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a policy on the held-out tasks; by default that of the newest round. Promotes nothing."""
    from rft_platform.common.errors import UserError
    from rft_platform.config.home import Home
    from rft_platform.online.project import open_project
    from rft_platform.run.start import use_home

    project = open_project(Home.from_environment())
    use_home(project.home)
    if everything:
        if any(option is not None for option in (round_number, checkpoint, model)):
            raise UserError("give --all or one policy, not both")
        evaluate_all(project, as_json)
    else:
        evaluate_one(project, chosen_policy(project, round_number, checkpoint, model), as_json)


def evaluate_one(project: "Project", policy: "Policy", as_json: bool) -> None:
    """Evaluate one policy and print the results and comparisons; writes nothing to the project."""
    from rft_platform.cluster.this_process import terminable
    from rft_platform.rounds.evaluate import measure
    from rft_platform.rounds.project.policy import deploy
    from rft_platform.rounds.releases.promotion import compared, promoted_last
    from rft_platform.rounds.setup.side_engines import connect_evaluation_engine
    from rft_platform.run.console import notes, output, print_json
    from rft_platform.run.live import showing_progress
    from rft_platform.run.start import used_processes_end

    console = notes()
    check_engine_is_free(project)
    with terminable(), used_processes_end(project.home, console), showing_progress(console):
        engine = connect_evaluation_engine(project)
        deploy(engine, policy)
        results = measure(project, engine, policy.round)
    differences = compared(project, policy, results[0], promoted_last(project))
    if as_json:
        found = {
            "results": [asdict(each) for each in results],
            "comparisons": [asdict(each) for each in differences],
        }
        print_json({"checkpoint": policy.folder, **found})
        return
    output().print(f"{policy.folder} (policy version {policy.policy_version})", markup=False, soft_wrap=True)
    output().print(results_table(project, results))
    if differences:
        output().print(comparisons_table(differences))


def evaluate_all(project: "Project", as_json: bool) -> None:
    """Evaluate each policy that has no result, one Dagster run per policy, and print the table of all policies."""
    from rft_platform.cli.views.round_table import print_bench, round_policy
    from rft_platform.run.console import notes
    from rft_platform.run.start import drive_project

    require_tasksets(project)
    round_policy(project)  # UserError if there is none
    check_engine_is_free(project)
    settings = project.config.model_copy(update={"mode": "bench"})
    drive_project(replace(project, config=settings), notes())
    print_bench(project, as_json)


def chosen_policy(project: "Project", round_number: int | None, checkpoint: Path | None, model: str | None) -> "Policy":
    """The policy that the options select, by default the newest. Raises UserError if more than one option is given."""
    from rft_platform.cli.views.round_table import round_policy
    from rft_platform.common.digests import digest_weights
    from rft_platform.common.errors import UserError
    from rft_platform.rounds.project.record import Policy
    from rft_platform.rounds.setup.connections import connect_registry

    selected = [option for option in (round_number, checkpoint, model) if option is not None]
    if len(selected) > 1:
        raise UserError("give one of --round, --checkpoint and --model")
    require_tasksets(project)
    if checkpoint is not None or model is not None:
        registered = None if model is None else connect_registry(project).resolve(model, verify=True)
        folder = registered.folder if registered else Path(checkpoint or "").absolute()
        if not folder.is_dir():
            raise UserError(f"--checkpoint {folder}: no such folder; give one with safetensors in it")
        tags = registered.tags if registered else _origin(folder)
        return Policy(
            str(folder), int(tags.get("policy_version", 0)), digest_weights(folder), round=int(tags.get("round", 0))
        )
    return round_policy(project, round_number)


def _origin(folder: Path) -> dict[str, str]:
    """Version and round of a checkpoint, by its manifest; nothing for a folder that is no checkpoint."""
    from rft_platform.common.digests import MANIFEST
    from rft_platform.model_registry.manifests import read_manifest

    if not (folder / MANIFEST).exists():
        return {}
    manifest = read_manifest(folder)
    return {"policy_version": str(manifest.policy_version), "round": str(manifest.lineage.get("round", 0))}


def require_tasksets(project: "Project") -> None:
    """Raise UserError if the project has no held-out tasks."""
    from rft_platform.common.errors import UserError

    if not project.config.buffer.explorer_input.eval_tasksets:
        raise UserError("buffer.explorer_input.eval_tasksets is empty: name the held-out tasks to evaluate on")


def check_engine_is_free(project: "Project") -> None:
    """Raise UserError while a run uses the engine, because a change of its weights would spoil that run."""
    from rft_platform.common.errors import UserError
    from rft_platform.jobs.driver_lock import refuse_second_driver
    from rft_platform.jobs.instance import open_instance
    from rft_platform.jobs.launches import launches

    refuse_second_driver(project.home)
    with open_instance(project.home) as instance:
        running = sorted(launches(instance).running)
    if running:
        kind, number = running[0]
        raise UserError(f"a run uses the engine ({kind} of round {number}): wait until it ends, then try again")


def results_table(project: "Project", results: "list[EvaluationResult]") -> "Table":
    """A table with one row per held-out taskset."""
    from rft_platform.run.console import table

    columns = ("taskset", "tasks", "sampled", "95 %", "greedy", "95 %", "failed", "seconds")
    found = table(*columns, left=["taskset"], no_wrap=True)
    for (_, dataset), result in zip(project.eval_tasks, results, strict=True):
        rates = []
        for rate in (result.sampled, result.greedy):
            rates += ["–", ""] if rate is None else [f"{rate.value:.1%}", f"{rate.low:.1%} to {rate.high:.1%}"]
        name = dataset.tasks[0].taskset
        found.add_row(name, f"{result.tasks:,}", *rates, f"{result.failed_runs:,}", f"{result.seconds:.1f}")
    return found


def comparisons_table(differences: "list[Comparison]") -> "Table":
    """A table with one row per metric and policy: the difference with its 95 % interval, paired over tasks."""
    from rft_platform.evaluation.comparison import distinct
    from rft_platform.evaluation.report import comparison_cell
    from rft_platform.run.console import table

    columns = ("difference from", "metric", "95 %, paired over tasks", "")
    found = table(*columns, left=columns, no_wrap=True)
    for each in distinct(differences):
        against = f"{each.against} (v{each.policy_version})"
        found.add_row(against, each.metric, comparison_cell(each), each.verdict)
    return found
