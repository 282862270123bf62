"""Judges in workers on the nodes of a Ray cluster: the judgements of one machine, whatever dies."""

import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rft_platform.common.errors import JudgeUnavailableError, UserCodeError, UserError
from rft_platform.config.schema.buffer import WeightedJudge
from rft_platform.config.schema.explorer import RuntimeEnv
from rft_platform.experience.record import JudgedRow, RolloutRow
from rft_platform.experience.responses import encode_response
from rft_platform.judging.execution.compose import JudgeSpec, build_judge
from rft_platform.judging.execution.judge_rollouts import judge_rollouts, judge_runs
from rft_platform.judging.types import RunJudgement
from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel, AuxiliarySpec
from rft_platform.rounds.setup.judge_workers import ClusterJudgeWorkers
from rft_platform.tasks.task import Task
from tests.judging.conftest import JudgeServer, run_rows
from tests.ray_cluster import judges

if TYPE_CHECKING:
    from rft_platform.cluster.ray.ray_cluster import RayCluster

pytestmark = pytest.mark.slow

LENGTH, SHARE, ODD, SLEEPS, COUNTED, REFUSES, ASKS = (
    f"{judges.__name__}:{name}" for name in ("length", "share", "odd_result", "sleeps", "counted", "refuses", "asks")
)
TASKS = {name: Task(name, "tasks", "Say a.", "a", {"question": f"Say {name}.", "answer": "a"}) for name in "tu"}


def weighted(*parts: tuple[str, float, dict[str, Any]]) -> JudgeSpec:
    return build_judge([WeightedJudge(judge=name, weight=weight, args=args) for name, weight, args in parts])


def there(judge: JudgeSpec, cluster: "RayCluster", **more: Any) -> JudgeSpec:
    return replace(judge, workers=ClusterJudgeWorkers(cluster, 4, **more))


def rows_of(answers: Sequence[str], group: str = "g") -> list[RolloutRow]:
    return run_rows(list(answers), group)


def facts(runs: Sequence[RunJudgement]) -> list[Any]:
    return [(run.run_id, run.reward if run.error is None else None, run.parts, run.error, run.rewards) for run in runs]


def stored(rows: Sequence[JudgedRow]) -> list[str]:
    """Text of the rows, in which NaN equals NaN."""
    return [repr(replace(row, reward_parts=dict(sorted(row.reward_parts.items())))) for row in rows]


def test_judgements_are_those_of_one_machine(cluster: "RayCluster") -> None:
    """Rules, functions of one run and of a group, classes of responses, and a failure."""
    judge = weighted((LENGTH, 1.0, {}), ("length", 0.5, {"max_chars": 100}), (SHARE, 0.25, {"factor": 3.0}))
    answers = ["a", "bb", "raise", "dddd"]
    rows = [*rows_of(answers), *run_rows(["eeeee", "f"], "h", "u")]
    rows += [replace(row, run_output=encode_response(judges.Answer("seven"))) for row in run_rows(["x", "y"], "i")]
    for options in ({"advantage_fn": "grpo"}, {"advantage_fn": None}):
        here = judge_rollouts(rows, TASKS, judge, **options)
        on_nodes = judge_rollouts(rows, TASKS, there(judge, cluster), **options)
        assert facts(on_nodes.runs) == facts(here.runs) and stored(on_nodes.rows) == stored(here.rows)
    failed = [run for run in on_nodes.runs if run.error is not None]
    assert [run.run_id for run in failed] == ["g-2"] and "judges.py:" in str(failed[0].error)
    assert {run.parts.get(f"{judges.__name__}:length/class") for run in on_nodes.runs[-2:]} == {1.0}
    assert on_nodes.runs[0].rewards.keys() == {"other"}


def test_results_that_are_no_rewards_fail_with_the_same_words(cluster: "RayCluster") -> None:
    judge, rows = build_judge(ODD), rows_of(["list", "fine", "nan"])
    here, on_nodes = judge_runs(rows, TASKS, judge), judge_runs(rows, TASKS, there(judge, cluster))
    assert facts(on_nodes) == facts(here) and [run.error is None for run in here] == [False, True, False]


def test_a_judge_that_takes_too_long_fails_on_its_run(cluster: "RayCluster") -> None:
    judge, rows = replace(build_judge(SLEEPS), timeout_s=0.5), rows_of(["0", "30", "0", "0"])
    here, on_nodes = judge_runs(rows, TASKS, judge), judge_runs(rows, TASKS, there(judge, cluster))
    assert facts(on_nodes) == facts(here)
    assert "the judge took longer than 0.5 s (judge_timeout_s)" in str(on_nodes[1].error)


@pytest.mark.parametrize("victim", ["worker", "actor"])
def test_a_judgement_whose_worker_dies_is_repeated(
    cluster: "RayCluster", tmp_path: Path, victim: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers = ["a", "kill", "bb", "kill-2", "ccc", "dddd"]
    judge = build_judge(COUNTED, {"folder": str(tmp_path), "victim": victim})
    runs = judge_runs(rows_of(answers), TASKS, there(judge, cluster))
    assert [(run.run_id, run.reward, run.error) for run in runs] == [
        (f"g-{number}", float(len(answer)), None) for number, answer in enumerate(answers)
    ]
    calls = {
        end: Counter(file.name.partition(".")[0] for file in tmp_path.glob(f"*.{end}")) for end in ("begun", "ended")
    }
    assert not list(tmp_path.glob(f"*.{os.getpid()}.*"))
    assert calls["ended"] == Counter(answers) and calls["begun"] == Counter([*answers, "kill", "kill-2"])
    how = "was killed by SIGKILL" if victim == "worker" else "was lost with its actor or its node"
    assert sum(how in record.getMessage() for record in caplog.records) == 2


def test_a_judge_that_kills_each_worker_fails_on_that_run_alone(cluster: "RayCluster", tmp_path: Path) -> None:
    judge = build_judge(COUNTED, {"folder": str(tmp_path), "victim": "always"})
    good, bad = judge_runs(rows_of(["a", "kill"]), TASKS, there(judge, cluster))
    assert good.reward == 1.0 and str(bad.error).startswith("WorkerDied: the judge's worker process was killed by SIG")
    assert str(bad.error).endswith("3 times in a row") and len(list(tmp_path.glob("kill.*.begun"))) == 3


def test_errors_that_concern_all_runs_keep_their_class(cluster: "RayCluster") -> None:
    with pytest.raises(UserError, match="the key is missing"):
        judge_runs(rows_of(["a"]), TASKS, there(build_judge(REFUSES), cluster))
    with pytest.raises(JudgeUnavailableError, match="the model is away"):
        judge_runs(rows_of(["unavailable"]), TASKS, there(build_judge(REFUSES), cluster))
    with pytest.raises(UserCodeError, match="the judge failed on the only run: LookupError"):
        judge_runs(rows_of(["raise"]), TASKS, there(build_judge(LENGTH), cluster))


def test_judges_may_ask_auxiliary_models(cluster: "RayCluster") -> None:
    server = JudgeServer(lambda prompt: "x" * len(prompt))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        model = AuxiliaryModel(AuxiliarySpec("helper", "m", server.model["base_url"]))
        options: dict[str, Any] = {"auxiliary_models": {"helper": model}}
        judge, rows = build_judge(ASKS), rows_of(["a", "b" * 100])
        here = judge_runs(rows, TASKS, judge, **options)
        assert facts(judge_runs(rows, TASKS, there(judge, cluster), **options)) == facts(here)
        assert here[0].reward < here[1].reward
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_other_code_on_a_node_is_refused(
    cluster: "RayCluster", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, reward in (("here", 1.0), ("there", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_judge.py").write_text(f"def judge(task, response):\n    return {reward}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    judge = build_judge("own_judge:judge")
    assert judge_runs(rows_of(["a"]), TASKS, there(judge, cluster))[0].reward == 1.0
    other = RuntimeEnv(working_dir=str(tmp_path / "there")).fields
    with pytest.raises(UserError, match=r"judge 'own_judge:judge': this node loads other code .*judges to false"):
        judge_runs(rows_of(["a"]), TASKS, there(judge, cluster, runtime_env=other))
