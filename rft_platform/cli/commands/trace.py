"""``rft trace``: from weights back to what made them, and from a row to the weights it went into."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from rft_platform.registry.lineage import CheckpointRef, CheckpointTrace, RowTrace
    from rft_platform.rounds.project import Project


def trace(
    target: Annotated[
        str,
        typer.Argument(
            help="models:/NAME@alias, models:/NAME/3, a checkpoint folder, a round (r0003) or a row id.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where weights come from (rows, judge, code, config), or which weights a row went into."""
    from rft_platform.cli.console import output, print_json
    from rft_platform.config.home import Home
    from rft_platform.registry.lineage import CheckpointTrace
    from rft_platform.rounds.project import Project

    found = find_trace(Project.open(Home.from_environment()), target)
    if as_json:
        print_json(found.to_json())
    elif isinstance(found, CheckpointTrace):
        print_checkpoint(found, output())
    else:
        print_row(found, output())


def find_trace(project: "Project", target: str) -> "CheckpointTrace | RowTrace":
    """The trace of whatever ``target`` names; raises UserError where it names nothing."""
    import re
    from pathlib import Path

    from rft_platform.cli.round_policy import round_policy
    from rft_platform.errors import UserError
    from rft_platform.experience.rounds import round_number
    from rft_platform.registry.lineage import trace_checkpoint, trace_row
    from rft_platform.rounds.processes import connect_registry

    registry, store = connect_registry(project), project.store
    if re.fullmatch(r"r\d{4,}", target):
        policy = round_policy(project, round_number(target))
        if policy.policy_version == 0 and project.config.warm_start is None:
            raise UserError(f"{target} ended with the base model {policy.folder}: no training stands behind it yet")
        return trace_checkpoint(policy.folder, store, registry)
    if target.startswith("models:/") or Path(target).is_dir():
        return trace_checkpoint(target, store, registry)
    return trace_row(target, store, project.checkpoints, registry)


def print_checkpoint(found: "CheckpointTrace", console: "Console") -> None:
    """Print the chain of trainings behind a checkpoint, newest first."""
    for training in found.trainings:
        console.print(_named(training.result), style="bold", markup=False, soft_wrap=True)
        _print_pairs(
            console,
            {
                "checkpoint": training.result.checkpoint,
                "weights": training.weights_digest,
                "trained from": f"{training.parent} (v{training.parent_version})",
                "rollouts": "\n".join(f"{file.path}  {file.rows:,} rows" for file in training.rollouts) or None,
                "judged": training.judged and f"{training.judged.path}  {training.rows_trained:,} rows trained on",
                "data": _data(training.data_digest, training.data_unchanged),
                "judge": training.judge_version,
                "config": training.config_digest,
                "code": training.code_version,
                "Dagster run": training.dagster_run_id,
            },
        )
    end = "" if found.complete else "  (the chain ends early: the manifest of an ancestor is gone)"
    console.print(f"base model {found.base_model}{end}", style="bold", markup=False, soft_wrap=True)


def print_row(found: "RowTrace", console: "Console") -> None:
    """Print where a row came from, what judges said of it and which weights it went into."""
    console.print(f"row {found.row_id}", style="bold", markup=False)
    judgements = [
        f"{judged.judge_version}: reward {judged.reward:.4g}, advantage {judged.advantage:.4g}"
        + (f", dropped by {judged.dropped_by}" if judged.dropped_by else "")
        + (" (in force)" if judged.in_force else "")
        for judged in found.judgements
    ]
    _print_pairs(
        console,
        {
            "round": f"{found.round}",
            "run": f"{found.run_id}, step {found.step}, group {found.group_id}",
            "task": f"{found.task_id} of {found.taskset}",
            "sampled by": f"policy version {found.policy_version} on {found.engine}",
            "judged": "\n".join(judgements) or "not yet",
            "trained": "\n".join(map(_named, found.trained)) or "no checkpoint",
            "carried on by": "\n".join(map(_named, found.descendants)) or "no later checkpoint",
        },
    )


def _named(ref: "CheckpointRef") -> str:
    round_part = "" if ref.round is None else f", round {ref.round}"
    model = "" if ref.model_version is None else f", model version {ref.model_version}"
    aliases = f" ({', '.join(ref.aliases)})" if ref.aliases else ""
    return f"policy version {ref.policy_version}{round_part}{model}{aliases}"


def _data(digest: str | None, unchanged: bool | None) -> str | None:
    if digest is None:
        return None
    state = {True: "the files still hold it", False: "the files have CHANGED since", None: "not compared"}[unchanged]
    return f"{digest}  ({state})"


def _print_pairs(console: "Console", pairs: dict[str, Any]) -> None:
    for name, value in pairs.items():
        if value is not None:
            lines = str(value).splitlines() or [""]
            for index, line in enumerate(lines):
                console.print(f"  {name if not index else '':<14}{line}", markup=False, soft_wrap=True)
