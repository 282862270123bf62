"""``rft judge``: judge stored rollouts again, and write preference pairs from judged runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from rft_platform.rounds.judge import JudgementFigures
    from rft_platform.rounds.project.project import Project


_DIGITS = 19  # of a number that no project reaches


def judge(
    rounds: Annotated[str, typer.Option(help="Rounds to judge: 3, or 1-5, or 1-3,7.")],
    judge: Annotated[str, typer.Option(help="Built-in name or module:function; default: the configured one.")] = "",
    args: Annotated[str, typer.Option(help="Keyword arguments of --judge, as a JSON object.")] = "",
    restore: Annotated[
        str, typer.Option(help="Do not judge; put the stored judgement of this judge version in force again.")
    ] = "",
    pairs: Annotated[
        Path | None, typer.Option(help="Do not judge; write the best and worst run of each task (.jsonl, .parquet).")
    ] = None,
    all_pairs: Annotated[bool, typer.Option(help="With --pairs: write every pair of runs of a task.")] = False,
    margin: Annotated[
        float, typer.Option(min=0.0, help="With --pairs: minimum difference between the two rewards.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Judge stored rollouts with another judge (or the configured one).

    Judgements of other judge versions are kept. One of the same version is replaced; the command refuses that if a
    training has read it and the new one differs.
    """
    from rft_platform.config.home import Home
    from rft_platform.online.project import open_project
    from rft_platform.run.console import output, print_json
    from rft_platform.run.start import use_home

    _check_options(pairs is not None, bool(judge or args or restore), bool(all_pairs or margin))
    project = open_project(Home.from_environment())
    use_home(project.home)
    numbers = chosen_rounds(rounds, max(project.store.rounds(), default=0))
    if pairs is not None:
        records: list[dict[str, Any]] = [_write_pairs(project, numbers, pairs, all_pairs, margin)]
    else:
        before, records = _judge_again(project, numbers, judge, args, restore)
        if not as_json:
            _print_judgements(project, before, records)
            return
    if as_json:
        print_json(records)
        return
    for line in records:
        output().print(
            ", ".join(f"{name} {_cell(value)}" for name, value in line.items() if _is_plain(value)), markup=False
        )


def _check_options(pairs: bool, judges: bool, selects: bool) -> None:
    """Raise UserError for options that would have no effect."""
    from rft_platform.common.errors import UserError

    if pairs and judges:
        raise UserError("--pairs writes pairs and does not judge: leave out --judge, --args, --restore")
    if selects and not pairs:
        raise UserError("--all-pairs and --margin select the pairs of --pairs FILE: give --pairs, too")


def _judge_again(
    project: "Project", numbers: list[int], judge: str, args: str, restore: str
) -> "tuple[list[JudgementFigures | None], list[dict[str, Any]]]":
    """Run ``judge_job`` for each round; returns the figures in force before, and the reports of the judgements."""
    from dataclasses import asdict

    from rft_platform.cluster.this_process import terminable
    from rft_platform.jobs.driver_lock import refuse_second_driver
    from rft_platform.jobs.rejudge import rejudge
    from rft_platform.project_definitions import stored_definitions
    from rft_platform.rounds.judge import figures
    from rft_platform.rounds.setup.taskset_binding import judges_of, other_judge
    from rft_platform.run.console import notes
    from rft_platform.run.live import showing_progress
    from rft_platform.run.start import used_processes_end

    judge_args = arguments(args)
    if restore:
        _check_kept(project, numbers, restore, judge or args)
    else:
        judges_of(project, other_judge(judge, judge_args, []))  # fails before a run starts
    refuse_second_driver(project.home)
    before = [figures(project.store, number) for number in numbers]
    config = {"judge": judge, "judge_args": judge_args, "restore": restore}
    with terminable(), used_processes_end(project.home, notes()), showing_progress(notes()):
        records = rejudge(project, stored_definitions(project.home), numbers, config)
    return before, [{**note, "before": asdict(old) if old else None} for note, old in zip(records, before, strict=True)]


def chosen_rounds(text: str, newest: int) -> list[int]:
    """The rounds in a text such as ``1-3,7``, in ascending order.

    Raises UserError if the text has another form, or names a round after the newest one.
    """
    from rft_platform.common.errors import UserError
    from rft_platform.experience.file_names import round_key

    numbers: set[int] = set()
    for part in text.split(","):
        ends = [end.strip() for end in part.split("-")]
        known = [int(end) for end in ends if end.isdecimal() and len(end) < _DIGITS]
        if len(known) != len(ends) or len(ends) > 2 or not 1 <= known[0] <= known[-1]:
            raise UserError(f"--rounds {text[:80]!r}: expected a round, a range or several of them, as in 1-3,7")
        if known[-1] > newest:
            raise UserError(
                f"--rounds {text[:80]!r}: expected rounds up to the newest one, {round_key(newest)}; see `rft rounds`"
            )
        numbers.update(range(known[0], known[-1] + 1))
    return sorted(numbers)


def arguments(text: str, option: str = "--args") -> dict[str, Any]:
    """The mapping in the JSON text of an option. Raises UserError for anything else."""
    import json

    from rft_platform.common.errors import UserError

    try:
        value = json.loads(text) if text else {}
    except ValueError as error:
        raise UserError(f"{option} {text!r}: expected JSON, as in '{{\"tolerance\": 0.1}}' ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{option} {text!r}: expected an object of arguments, as in '{{\"tolerance\": 0.1}}'")
    return value


def _check_kept(project: "Project", numbers: list[int], version: str, judge: str) -> None:
    """Raise UserError, before any change, if a round lacks the judgement, or if ``--judge`` is given too."""
    from rft_platform.common.errors import UserError
    from rft_platform.experience.file_names import round_key

    if judge:
        raise UserError("give --restore or a judge, not both")
    for number in numbers:
        known = project.store.judge_versions(number)
        if version not in known:
            kept = ", ".join(known) or "none"
            raise UserError(f"--restore {version}: {round_key(number)} has the judgements {kept}; give one of these")


def _print_judgements(project: "Project", before: "list[JudgementFigures | None]", notes: list[dict[str, Any]]) -> None:
    """Print each round's earlier and new judgement, the one in force, and the command that restores the earlier one."""
    from rft_platform.experience.file_names import round_key
    from rft_platform.rounds.judge import figures
    from rft_platform.run.console import output

    console, now = output(), [figures(project.store, note["round"]) for note in notes]
    console.print(_judgements_table(before, now))
    for note, old, new in zip(notes, before, now, strict=True):
        key, calls = round_key(note["round"]), note.get("judge_calls")
        if calls is not None:
            usage = ", ".join(f"{note[f'judge_{name}']:,} {name}" for name in ("calls", "cached", "retries", "tokens"))
            console.print(f"{key}: judge model: {usage}", markup=False, soft_wrap=True)
        if new is not None and old is not None and old.judge_version != new.judge_version:
            back = f"rft judge --rounds {note['round']} --restore {old.judge_version}"
            line = f"judgement {new.judge_version} is in force; to go back: {back}"
            console.print(f"{key}: {line}", markup=False, soft_wrap=True)
        elif new is not None:
            line = f"judgement {new.judge_version} is in force" + (", as before" if old else "")
            console.print(f"{key}: {line}", markup=False, soft_wrap=True)


def _judgements_table(before: "Sequence[JudgementFigures | None]", now: "Sequence[JudgementFigures | None]") -> "Table":
    """A table with two rows per round: the judgement that was in force before, and the one that is in force now."""
    from rft_platform.experience.file_names import round_key
    from rft_platform.run.console import table

    names = ("round", "", "judge", "version")
    figures = ("mean reward", "passed", "runs judged", "failed", "rows dropped")
    judgements = table(*names, *figures, left=names, no_wrap=True)
    for old, new in zip(before, now, strict=True):
        for label, each in (("before", old), ("now", new)):
            if each is not None:
                reward = "–" if each.mean_reward is None else _cell(each.mean_reward)
                passed = "–" if each.pass_rate is None else f"{each.pass_rate:.1%}"
                counts = (f"{count:,}" for count in (each.runs, each.failed, each.dropped_rows))
                judgements.add_row(
                    round_key(each.round), label, _short(each.judge), each.judge_version, reward, passed, *counts
                )
    return judgements


def _short(judge: str) -> str:
    """The name of a judge for a table; the name of a function in a file is shown without the file's folder."""
    return " + ".join(part.rsplit("/", 1)[-1] for part in judge.split(" + ")) or "–"


def _write_pairs(project: "Project", numbers: list[int], file: Path, every: bool, margin: float) -> dict[str, Any]:
    from rft_platform.judging.preferences import preference_pairs, write_pairs

    made = [
        preference_pairs(
            project.store.rollout_rows(number),
            project.store.judged_rows(number),
            least_margin=margin,
            which="all" if every else "extremes",
        )
        for number in numbers
    ]
    write_pairs(file, [row for pairs in made for row in pairs.rows])
    return {
        "file": str(file),
        "pairs": sum(len(pairs.rows) for pairs in made),
        "groups": sum(pairs.groups for pairs in made),
        "groups_without_pair": sum(pairs.without_pair for pairs in made),
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
