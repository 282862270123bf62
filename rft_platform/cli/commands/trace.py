"""``rft trace``: trace weights back to their origin, or a row forward to the weights trained on it."""

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from rft_platform.model_registry.models import ModelRegistry
    from rft_platform.rounds.project.project import Project
    from rft_platform.rounds.reporting.lineage import CheckpointRef, CheckpointTrace, RowTrace, TrainingTrace
    from rft_platform.traces.origins import Origin

_TARGETS = "models:/NAME@alias, models:/NAME/3, a checkpoint folder, a round (r0003, r0003/POLICY), a run or a row id"
_ROUND = r"r\d{4,}"
_OF_POLICY = r"(r\d{4,})/([a-z0-9_-]+)"
_ROW = r"[0-9a-f]{32}"
_RUN = r"(r\d{4,})-b\d+-t\d+-\d+"  # as the pages of `rft view` show it
_SHOWN = 10  # number of later checkpoints printed for a row without --all


def trace(
    target: Annotated[
        str,
        typer.Argument(
            help=f"{_TARGETS}. The page of a run in `rft view` shows the ids of its rows.",
            show_default=False,
        ),
    ],
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Read every file of rows and weights, compare it with its digest, and fail if one differs."
        ),
    ] = False,
    code: Annotated[
        bool, typer.Option("--code", help="Print the user's code, and how it differs from that of the training before.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Print every training of the chain.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where weights come from (rows, judge, code, config), or which weights a row went into."""
    from rft_platform.cli.views.user_code import print_user_code
    from rft_platform.config.home import Home
    from rft_platform.experience.file_names import round_number
    from rft_platform.online.project import open_project
    from rft_platform.rounds.reporting.lineage import CheckpointTrace
    from rft_platform.run.console import output, print_json

    project = open_project(Home.from_environment())
    if re.fullmatch(_RUN, target):
        _print_run(project, target, every, as_json)
        return
    found = find_trace(project, target, verify=verify)
    whole = whole_checkpoints(found) if verify and isinstance(found, CheckpointTrace) else 0
    if as_json:
        print_json(found.to_json() if isinstance(found, CheckpointTrace) else found)
    elif isinstance(found, CheckpointTrace):
        reason = without_steps(project, round_number(target)) if re.fullmatch(_ROUND, target) else None
        if reason is not None:
            output().print(f"{target} {reason}:", markup=False, soft_wrap=True)
        if every or len(found.trainings) == 1:
            print_checkpoint(found, output(), every_trace=every)
        else:
            print_chain_summary(found, output())
        print_user_code(found, project.store.root, output(), whole=code)
        if verify:
            print_verified(found, whole, output())
    else:
        print_row(found, output(), None if every else _SHOWN)
    if verify and isinstance(found, CheckpointTrace) and changed_trainings(found):
        raise typer.Exit(1)


def _print_run(project: "Project", run_id: str, every: bool, as_json: bool) -> None:
    """Print the trace of each row of a run, in the order of its calls. Raises UserError if there is no such run."""
    from rft_platform.common.errors import UserError
    from rft_platform.experience.file_names import round_number
    from rft_platform.rounds.reporting.lineage import trace_row
    from rft_platform.rounds.setup.connections import connect_registry
    from rft_platform.run.console import output, print_json

    number = round_number(run_id.partition("-")[0])
    stored: list[dict[str, Any]] = []
    if number in project.store.rounds() and not project.store.ledger(number).read().retired:
        stored = project.store.read_rollouts(number, ["row_id", "run_id", "step"]).to_pylist()
    rows = sorted((row for row in stored if row["run_id"] == run_id), key=lambda row: int(row["step"]))
    if not rows:
        raise UserError(f"{run_id}: round {number} has no rows of this run; `rft view` lists the runs of a round")
    registry = connect_registry(project)
    found = [trace_row(row["row_id"], project.store, project.checkpoints, registry) for row in rows]
    if as_json:
        print_json(found)
        return
    for row in found:
        print_row(row, output(), None if every else _SHOWN)


def find_trace(project: "Project", target: str, *, verify: bool = False) -> "CheckpointTrace | RowTrace":
    """The trace of ``target``. Raises UserError if ``target`` names no checkpoint, model, round or row.

    With ``verify`` the files behind a checkpoint are read completely; raises StorageError that names damaged files.
    """
    from rft_platform.cli.views.round_table import round_policy
    from rft_platform.common.errors import UserError
    from rft_platform.experience.file_names import round_number
    from rft_platform.rounds.project.record import required
    from rft_platform.rounds.reporting.lineage import trace_checkpoint, trace_row
    from rft_platform.rounds.setup.connections import connect_registry

    registry, store = connect_registry(project), project.store
    traced = partial(
        trace_checkpoint, store=store, project=(project.config.project, project.config.name), verify=verify
    )
    if re.fullmatch(_ROUND, target):
        number = round_number(target)
        policy = round_policy(project, number)
        if policy.policy_version == 0 and project.config.warm_start is None:
            raise UserError(
                f"{target} ended with the base model {policy.folder}: "
                + (without_steps(project, number) or "it has not been trained yet")
            )
        return traced(policy.folder, registry=registry)
    if (of_policy := re.fullmatch(_OF_POLICY, target)) and not Path(target).is_dir():
        number, name = round_number(of_policy[1]), of_policy[2]
        _, *others = project.policies
        if name not in others:
            known = ", ".join(others) or "none"
            raise UserError(f"{target}: no policy {name!r}; the section policies has {known}")
        policy = required(store, number, name)
        return traced(policy.folder, registry=registry.of_policy(name))
    if target.startswith("models:/") or Path(target).is_dir():
        return traced(target, registry=_of_model(project, registry, target))
    if not re.fullmatch(_ROW, target):
        raise UserError(f"{target}: expected {_TARGETS} (32 hexadecimal digits){_meant(project, target)}")
    return trace_row(target, store, project.checkpoints, registry)


def _meant(project: "Project", target: str) -> str:
    """A suggestion if ``target`` resembles a round or the name of the project's model; otherwise an empty text."""
    import difflib

    if match := re.fullmatch(r"r?(\d+)", target):
        return f"; did you mean r{int(match[1]):04d}?"
    name, separator, version = target.removeprefix("models:").strip("/").partition("@" if "@" in target else "/")
    near = difflib.get_close_matches(name, [project.model_name], n=1)
    return f"; did you mean models:/{near[0]}{separator}{version}?" if near and version else ""


def _of_model(project: "Project", registry: "ModelRegistry", target: str) -> "ModelRegistry":
    """The registry of the policy to which the checkpoint or model ``target`` belongs."""
    _, *others = project.policies
    for name in others:
        other, folder = registry.of_policy(name), project.checkpoints_of(name)
        if target.startswith((f"models:/{other.model_name}/", f"models:/{other.model_name}@")):
            return other
        if not target.startswith("models:/") and folder.absolute() in Path(target).absolute().parents:
            return other
    return registry


def without_steps(project: "Project", number: int) -> str | None:
    """Why a round trained nothing and which weights it ended with; None for a round that trained."""
    from rft_platform.rounds.project.record import read
    from rft_platform.run.round_lines import nothing_trained

    why = nothing_trained(read(project.store, number).trained())
    return None if why is None else f"{why}; the round ended with its parent's weights"


def print_chain_summary(found: "CheckpointTrace", console: "Console") -> None:
    """Print a checkpoint in a few lines: the data of its last training, and the number of earlier trainings."""
    newest, before = found.trainings[0], found.trainings[1:]
    data = {True: "", False: "; the files have CHANGED since then", None: "; not compared"}[newest.data_unchanged]
    console.print(_named(newest.result), style="bold", markup=False, soft_wrap=True)
    _print_pairs(
        console,
        {
            "checkpoint": newest.result.checkpoint,
            "trained on": f"{_counts(newest, 'rows')}{data}",
            "with": ", ".join(
                f"{name} {value}"
                for name, value in {
                    "algorithm": newest.more.get("algorithm"),
                    "judge": _judge(newest),
                    "config": newest.config_digest and newest.config_digest[:16],
                    "code": newest.code_version,
                }.items()
                if value
            ),
            "imported from": _traces(newest.imported, every=False),
            "before that": f"{_before(before)}, from {_base(found)}",
        },
    )
    console.print("--all shows every training with its files", markup=False, soft_wrap=True)


def _judge(training: "TrainingTrace") -> str | None:
    """Name and version of the judge."""
    names = (training.judge_name, training.judge_version and f"({training.judge_version})")
    return " ".join(filter(None, names)) if training.judge_name else training.judge_version


def whole_checkpoints(found: "CheckpointTrace") -> int:
    """Compare every file of the chain's checkpoints with its digest; returns the number of checkpoints compared.

    A checkpoint without weights, removed on purpose, is left out. Raises DamagedError that names the damaged folders.
    """
    from rft_platform.common.digests import MANIFEST, THINNED, checkpoint_damage
    from rft_platform.common.errors import DamagedError

    newest, *before = [Path(training.result.checkpoint) for training in found.trainings]
    superseded = {folder for folder in before if [file.name for file in folder.iterdir()] == [MANIFEST]}
    kept = [each for each in (newest, *before) if each not in superseded and not (each / THINNED).exists()]
    damaged = [f"{folder}: {why}" for folder in kept if (why := checkpoint_damage(folder)) is not None]
    if damaged:
        raise DamagedError("; ".join(damaged))
    return len(kept)


def changed_trainings(found: "CheckpointTrace") -> "list[TrainingTrace]":
    """The trainings whose rows are not those that they read any more."""
    return [training for training in found.trainings if training.data_unchanged is False]


def print_verified(found: "CheckpointTrace", whole: int, console: "Console") -> None:
    """Print the result of ``--verify``; damaged row files have raised an error before this call."""
    files = len({file.path for training in found.trainings for file in (*training.rollouts, training.judged) if file})
    text = (
        f"verified: {files:,} files of rows and {whole:,} of {len(found.trainings):,} checkpoints match their digests"
    )
    missing = len(found.trainings) - whole
    console.print(text + (f" ({missing:,} keep only their manifest)" if missing else ""), markup=False, soft_wrap=True)
    for training in changed_trainings(found):
        console.print(f"{_named(training.result)}: its rows have CHANGED since", markup=False, soft_wrap=True)


def _counts(training: "TrainingTrace", trained: str = "rows trained on") -> str:
    """The number of rows trained on, and of those that were not, by reason."""
    if training.rows_trained is None and not training.result.round:
        return "demonstrations"
    others = {
        "masked (their rewards count in their groups)": training.rows_masked,
        "dropped": training.rows_dropped,
        **training.rows_left_out,
    }
    found = [f"{count:,} {reason}" for reason, count in others.items() if count]
    return f"{_rows(training.rows_trained)} {trained}" + (f"; not: {', '.join(found)}" if found else "")


def _rows(count: int | None) -> str:
    return "an unknown number of" if count is None else f"{count:,}"


def _before(trainings: "Sequence[TrainingTrace]") -> str:
    from rft_platform.rounds.reporting.lineage import of_rounds, total_rows

    count = len(of_rounds(trainings))
    warm_start = len(trainings) - count
    parts = [f"{count:,} training{'' if count == 1 else 's'} on {_rows(total_rows(trainings))} rows"] if count else []
    changed = sum(training.data_unchanged is False for training in trainings)
    parts = [f"{part} (the rows of {changed:,} have CHANGED since then)" if changed else part for part in parts]
    parts += [f"a warm start with {warm_start:,} checkpoint{'' if warm_start == 1 else 's'}"] if warm_start else []
    return " after ".join(parts)


def print_checkpoint(
    found: "CheckpointTrace", console: "Console", shown: int | None = None, *, every_trace: bool = False
) -> None:
    """Print the chain of trainings behind a checkpoint, newest first; ``shown`` limits their number.

    Of the traces that rows were imported from, the first ones are printed, or with ``every_trace`` all.
    """
    for training in found.trainings[:shown]:
        console.print(_named(training.result), style="bold", markup=False, soft_wrap=True)
        _print_pairs(
            console,
            {
                "checkpoint": training.result.checkpoint,
                "weights": training.weights_digest,
                "trained from": f"{training.parent} (v{training.parent_version})",
                "rollouts": "\n".join(f"{file.path}  {file.rows:,} rows" for file in training.rollouts) or None,
                "selection": training.selection
                and f"{training.selection.path}  {_rows(training.rows_trained)} of {training.selection.rows:,} rows "
                "trained",
                "dataset": _dataset(training),
                "from": _source(training.more),
                "imported from": _traces(training.imported, every_trace),
                "teacher": training.more.get("teacher"),
                "retired": training.retired or None,
                "judged": training.judged and f"{training.judged.path}  {_counts(training)}",
                "data": _data(training.data_digest, training.data_unchanged),
                "judge": _judge(training),
                "policy": training.more.get("policy"),
                "algorithm": training.more.get("algorithm"),
                "plugins": training.more.get("plugins_digest"),
                "config": training.config_digest,
                "code": training.code_version,
                "Dagster run": training.dagster_run_id,
            },
        )
    more = found.trainings[shown:] if shown is not None else ()
    if more:
        text = f"... and before that {_before(more)} (--all shows them)"
        console.print(text, style="bold", markup=False, soft_wrap=True)
    console.print(_base(found), style="bold", markup=False, soft_wrap=True)


def print_row(found: "RowTrace", console: "Console", shown: int | None = None) -> None:
    """Print the origin of a row, its judgements, and the weights that were trained on it.

    ``shown`` is the maximum number of later checkpoints to print; the newest are printed.
    """
    console.print(f"row {found.row_id}", style="bold", markup=False)
    judgements = [
        f"{judged.judge_version}: {_reward(judged.reward)}, advantage {judged.advantage:.4g}"
        + (f", {'masked' if judged.masked else 'dropped'} by {judged.dropped_by}" if judged.dropped_by else "")
        + (f": {judged.judge_error}" if judged.judge_error else "")
        + (" (in force)" if judged.in_force else "")
        for judged in found.judgements
    ]
    _print_pairs(
        console,
        {
            "round": f"{found.round}",
            "run": f"{found.run_id}, step {found.step}, group {found.group_id}",
            "task": found.task_id and f"{found.task_id} of {found.taskset}",
            "sampled by": found.engine
            and f"policy {f'{found.policy} ' if found.policy else ''}version {_versions(found)} on {found.engine}",
            "retired": found.retired or None,
            "judged": "\n".join(judgements) or "not yet",
            "trained": "\n".join(map(_named, found.trained)) or "no checkpoint",
            "descendants": _newest(found.descendants, shown) or "no later checkpoint",
        },
    )


def _reward(reward: float | None) -> str:
    return "no reward" if reward is None else f"reward {reward:.4g}"


def _base(found: "CheckpointTrace") -> str:
    end = "" if found.complete else "  (the chain ends early: the manifest of an ancestor is missing)"
    return f"base model {found.base_model}{end}"


def _versions(found: "RowTrace") -> str:
    """The version that sampled a row; with the number of tokens of each if there are several."""
    tokens = Counter(found.token_versions or ())
    return ", ".join(f"{version} ({count} tokens)" for version, count in tokens.items()) or str(found.policy_version)


def _named(ref: "CheckpointRef") -> str:
    round_part = "" if ref.round is None else f", round {ref.round}"
    model = "" if ref.model_version is None else f", model version {ref.model_version}"
    aliases = f" ({', '.join(ref.aliases)})" if ref.aliases else ""
    return f"policy version {ref.policy_version}{round_part}{model}{aliases}"


def _newest(refs: "Sequence[CheckpointRef]", shown: int | None) -> str:
    hidden = 0 if shown is None else max(0, len(refs) - shown)
    plural = "" if hidden == 1 else "s"
    lines = [f"{hidden:,} earlier checkpoint{plural} (--all shows them), then"] if hidden else []
    return "\n".join([*lines, *map(_named, refs[hidden:])])


def _data(digest: str | None, unchanged: bool | None) -> str | None:
    if digest is None:
        return None
    state = {True: "unchanged in the round", False: "the files have CHANGED since then", None: "not compared"}[
        unchanged
    ]
    return f"{digest}  ({state})"


def _dataset(training: "TrainingTrace") -> str | None:
    """The rows of an offline training; for a training of another project, the names used there."""
    if training.dataset is not None:
        return f"{training.dataset.path}  {training.dataset.rows:,} rows"
    lineage = training.more
    if "dataset" not in lineage:
        return None
    origin = f"{lineage.get('project')}/{lineage.get('name')}"
    return f"{lineage['dataset']} of {origin}  {_rows(lineage.get('dataset_rows'))} rows"


def _traces(imported: "Sequence[Origin]", every: bool) -> str | None:
    """The traces of other tools, each with its link; the first ones, or all of them."""
    from rft_platform.common.redaction import visible

    if not imported:
        return None
    named = imported if every else imported[:_SHOWN]
    lines = [visible(f"{one.format} {one.id}{f'  {one.link}' if one.link else ''}") for one in named]
    more = [f"and {len(imported) - len(named):,} more (--all shows them)"] if len(named) < len(imported) else []
    plural = "" if len(imported) == 1 else "s"
    return "\n".join([f"{len(imported):,} trace{plural}", *lines, *more])


def _source(lineage: dict[str, Any]) -> str | None:
    """The source of a dataset with its digest; None for a training without a dataset."""
    digest, source = lineage.get("source_sha256"), lineage.get("source")
    return f"{source}  (sha256 {digest[:16]})" if source and digest else source


def _print_pairs(console: "Console", pairs: dict[str, Any]) -> None:
    for name, value in pairs.items():
        if value is not None:
            lines = str(value).splitlines() or [""]
            for index, line in enumerate(lines):
                console.print(f"  {name if not index else '':<14}{line}", markup=False, soft_wrap=True)
