"""Print the table of rounds, what the project launches next or waits for, and the table of all policies."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rft_platform.common.errors import UserError
from rft_platform.experience.file_names import round_key
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, read, required
from rft_platform.rounds.releases.training_start import refusal_hint
from rft_platform.run.console import notes, output, print_json, table
from rft_platform.run.round_lines import RoundLine, champion_notes, round_lines
from rft_platform.servers.next_launches import what_is_next

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MISSING = "–"
_TABLE_WIDTH = 135  # a narrower terminal wraps the lines, and no column is hidden
_SECONDS = ("rollout", "judge", "train", "evaluation", "overhead")


LAST = 100  # rounds shown in the table


def print_rounds(project: Project, console: "Console", last: int = LAST) -> None:
    """Print the table of the ``last`` rounds (0: all), and the plan's next step."""
    from rft_platform.online.releases.versions import pinned_version  # these modules have the database of the service
    from rft_platform.online.traffic.project_traffic import stale_rows

    lines = round_lines(project, last)
    console.print(rounds_table(lines), width=max(console.width, _TABLE_WIDTH), crop=False)
    if (hidden := len(project.store.rounds()) - len(lines)) > 0:
        console.print(f"{hidden:,} earlier rounds are not shown: `rft rounds --last 0` shows all", soft_wrap=True)
    for line in lines:
        if line.judged_anew:
            note = "judged again after its training; * marks a reward that the training did not use"
            console.print(f"{_name(line)}: {note}", markup=False, soft_wrap=True)
    for line in lines:
        if line.started_again:
            console.print(f"{_name(line)}: {line.started_again}", markup=False, soft_wrap=True)
    for reason, same in groupby(lines, lambda line: line.nothing_trained):
        if reason:
            first, *others = map(_name, same)
            named = f"{first} to {others[-1]}" if others else first
            console.print(f"{named}: {reason}", markup=False, soft_wrap=True)
    if failures := "; ".join(f"{_name(line)}: {line.failures}" for line in lines if line.failures):
        console.print(failures, markup=False, soft_wrap=True)
    hints = (refusal_hint(project), pinned_version(project), stale_rows(project))
    for hint in (*champion_notes(project, lines), *hints):
        if hint:
            console.print(hint, markup=False, soft_wrap=True)
    console.print("; ".join(what_is_next(project)), markup=False, soft_wrap=True)


def rounds_table(lines: Sequence[RoundLine]) -> "Table":
    """One row per round; seconds are given as rollout / judge / train / evaluation / other."""
    figures = ("reward", "sampled", "greedy", "mismatch", "entropy", "rows", "tok/s", "s: roll/judge/train/eval/other")
    rounds = table("round", *figures, "policy", "model", "", left=[""], no_wrap=True)
    for line in lines:
        rounds.add_row(*_cells(line))
    return rounds


def _name(line: RoundLine) -> str:
    return round_key(line.round) if line.round else "start"


def _cells(line: RoundLine) -> list[str]:
    return [
        _name(line),
        _number(line.reward, ".3f") + ("*" if line.judged_anew else ""),
        _percent(line.pass_rate_sampled),
        _percent(line.pass_rate_greedy),
        _number(line.mismatch, ".2g"),
        _number(line.entropy, ".3f"),
        _number(line.rows, ",d"),
        _number(line.tokens_per_s, ",.0f"),
        " / ".join(_number(line.seconds.get(name), ".1f") for name in _SECONDS) if line.seconds else _MISSING,
        _versions(line),
        line.model_version or _MISSING,
        _remark(line),
    ]


def _remark(line: RoundLine) -> str:
    if line.champion:
        return "champion"
    return f"trained in {round_key(line.trained_in)}" if line.trained_in else ""


def _versions(line: RoundLine) -> str:
    """The version of the first policy, then name and version of each further policy."""
    if line.policy_version is None:
        return _MISSING
    return ", ".join([f"v{line.policy_version}", *(f"{name} v{number}" for name, number in line.policies.items())])


def _percent(value: float | None) -> str:
    return _number(value, ".1%")


def _number(value: float | None, form: str) -> str:
    if value is None:
        return _MISSING
    return format(value, ".2e" if form.endswith("f") and abs(value) >= 1e6 else form)  # keeps the column width


def print_bench(project: Project, as_json: bool = False) -> None:
    """Print the table of all policies, write it to the project's folder, and print the path."""
    from rft_platform.rounds.reporting.bench import HEADER, bench_lines, bench_rows, write_bench

    lines, page = bench_lines(project), write_bench(project)
    if as_json:
        print_json({"policies": [line.to_json() for line in lines], "page": str(page)})
        return
    policies = table(*HEADER, left=HEADER[:2])
    for row in bench_rows(lines):
        policies.add_row(*row)
    output().print(policies)
    notes().print(f"as a page: {page}", markup=False, soft_wrap=True)


def round_policy(project: Project, number: int | None = None) -> Policy:
    """The policy that round ``number`` (default: the newest) ended with. Raises UserError if there is none."""
    have = [n for n in project.store.rounds() if read(project.store, n).has(Policy)]
    if not have:
        raise UserError(f"{project.home.root}: no round has published a policy yet; run a training first")
    wanted = have[-1] if number is None else number
    if wanted not in have:
        raise UserError(
            f"{round_key(wanted)} has published no policy; {round_key(have[0])} to {round_key(have[-1])} have"
        )
    return required(project.store, wanted)
