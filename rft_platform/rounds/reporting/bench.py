"""Benchmark of all policies of a project on its held-out tasks: which are not evaluated yet, and the results table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rft_platform.common.digests import THINNED
from rft_platform.common.files import write_json, write_text
from rft_platform.evaluation.comparison import Comparison
from rft_platform.evaluation.report import comparison_cell, table
from rft_platform.evaluation.results import EvaluationResult, tasks_digest
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, RoundEvaluation, published, read
from rft_platform.rounds.setup.taskset_binding import measured_by

REPORT, DATA = "bench.md", "bench.json"
HEADER = ("policy", "taskset", "sampled", "greedy", "reward", "from the start", "from the champion")


@dataclass(frozen=True, slots=True)
class BenchLine:
    """One policy of the project. ``left_out`` is the reason why it has no results."""

    round: int
    policy_version: int
    checkpoint: str
    results: tuple[EvaluationResult, ...] = ()
    compared: tuple[Comparison, ...] = ()
    promoted: bool = False
    left_out: str = ""

    def to_json(self) -> dict[str, Any]:
        """The line as plain JSON values, without the scores and transcripts of single runs."""
        metrics = [{**result.summary(), **result.metrics} for result in self.results]
        return {
            **{name: getattr(self, name) for name in ("round", "policy_version", "checkpoint", "promoted", "left_out")},
            "metrics": metrics,
            "comparisons": [asdict(each) for each in self.compared],
        }


def unmeasured(project: Project) -> list[int]:
    """Rounds whose policy has no evaluation on the currently configured held-out tasks, ascending.

    Policies with equal weights are evaluated once; rounds of which the weights of a policy were removed are skipped.
    """
    rounds = []
    policies = [policy for number in project.store.rounds() if (policy := published(project.store, number))]
    wanted = _wanted(project)
    seen = {policy.weights_digest for policy in policies if _holds(project, policy.round, wanted)}
    for policy in policies:
        if policy.weights_digest not in seen and not removed(project, policy.round):
            seen.add(policy.weights_digest)
            rounds.append(policy.round)
    return rounds


def _wanted(project: Project) -> list[tuple[str, int, str]]:
    """For each held-out taskset: the digest of its tasks, the number of sampled runs, and ``measured_by``."""
    return [
        (
            tasks_digest(task.task_id for task in dataset.tasks),
            taskset.rollout_args.n or project.config.evaluation.sampled_n,
            measured_by(project, taskset),
        )
        for taskset, dataset in project.eval_tasks
    ]


def _holds(project: Project, round_number: int, wanted: list[tuple[str, int, str]]) -> bool:
    """Whether the round has a result for every held-out taskset as currently configured."""
    evaluated = read(project.store, round_number).evaluated
    results = [] if evaluated is None else evaluated.results
    if [(result.tasks_digest, result.sampled_n, result.measured_by) for result in results] != wanted:
        return False
    return not project.config.evaluation.greedy or all(result.greedy is not None for result in results)


def removed(project: Project, round_number: int) -> bool:
    """Whether weights that a round ended with were removed, by ``trainer.max_checkpoints_to_keep`` or by hand."""
    found = (published(project.store, round_number, name) for name in project.policies)
    folders = [Path(policy.folder) for policy in found if policy is not None]
    return any((folder / THINNED).exists() or not any(folder.glob("*.safetensors")) for folder in folders)


def bench_lines(project: Project) -> list[BenchLine]:
    """One line for every published policy, the starting policy first."""
    store = project.store
    policies = [policy for number in store.rounds() if (policy := published(store, number))]
    wanted = _wanted(project)
    measured = {policy.round: policy for policy in policies if _holds(project, policy.round, wanted)}
    twins = {policy.weights_digest: number for number, policy in measured.items()}
    return [_line(project, policy, policy.round in measured, twins.get(policy.weights_digest)) for policy in policies]


def write_bench(project: Project) -> Path:
    """Write the table of all policies as Markdown and JSON to the project's folder; returns the Markdown file."""
    lines = bench_lines(project)
    write_json(project.home.root / DATA, [line.to_json() for line in lines])
    path = project.home.root / REPORT
    title = f"# {project.config.project} / {project.config.name}: all policies"
    write_text(path, f"{title}\n\n{bench_table(lines)}\n\nsampled, greedy: pass rates (reward >= 1)\n")
    return path


def bench_table(lines: Sequence[BenchLine]) -> str:
    """The results as a Markdown table, one row per policy and held-out taskset."""
    return table(HEADER, bench_rows(lines))


def bench_rows(lines: Sequence[BenchLine]) -> list[list[str]]:
    """The cells of the table, in the order of ``HEADER``. Only the first taskset has comparisons."""
    rows = []
    for line in lines:
        name = f"round {line.round} (v{line.policy_version})" + (", promoted" if line.promoted else "")
        if not line.results:
            rows.append([name, line.left_out, "", "", "", "", ""])
        for position, result in enumerate(line.results):
            compared = line.compared if position == 0 else ()
            differences = [_difference(compared, against) for against in ("start", "champion")]
            rows.append([name, _taskset(result), *_cells(result), *differences])
    return rows


def _line(project: Project, policy: Policy, measured: bool, twin: int | None) -> BenchLine:
    """``twin`` is a round that evaluated the same weights."""
    evaluated = read(project.store, policy.round).evaluated or RoundEvaluation()
    line = BenchLine(policy.round, policy.policy_version, policy.folder, promoted=evaluated.promoted)
    if measured:
        return replace(line, results=tuple(evaluated.results), compared=tuple(evaluated.compared))
    if twin is not None:
        return replace(line, left_out=f"the weights of round {twin}")
    return replace(line, left_out="its weights were removed" if removed(project, policy.round) else "not measured yet")


def _taskset(result: EvaluationResult) -> str:
    return next((name.split("/")[1] for name in result.metrics), "")


def _cells(result: EvaluationResult) -> list[str]:
    rates = ["–" if rate is None else f"{rate.value:.1%}" for rate in (result.sampled, result.greedy)]
    return [*rates, "–" if result.mean_reward is None else f"{result.mean_reward:.4f}"]


def _difference(compared: tuple[Comparison, ...], against: str) -> str:
    found = next((each for each in compared if each.against == against), None)
    return "" if found is None else comparison_cell(found)
