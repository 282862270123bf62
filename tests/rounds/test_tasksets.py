"""Several tasksets in one round: each has its tasks, workflow, sampling parameters, judge and order."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.checks.machine import Machine
from rft_platform.config.checks.settings import settings_findings
from rft_platform.config.findings import refuse
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.buffer import Taskset
from rft_platform.inference.interface import PolicyEngine
from rft_platform.rounds.explore import explore
from rft_platform.rounds.judge import judge
from rft_platform.rounds.project.project import Project, load_taskset, stamps
from rft_platform.rounds.project.record import read
from rft_platform.rounds.selection.task_selection import TaskSelection, mixture_of
from rft_platform.rounds.setup.taskset_binding import OtherJudge, judges_of
from rft_platform.tasks.sources import source_files
from tests.rounds.test_dynamic_sampling import serving

WORKFLOW = """
from rft_platform.rollout.workflow import WorkflowOutput

async def asks(task, model):
    await model.chat([{"role": "user", "content": task["text"]}])
    return WorkflowOutput(reward=float(task["text"].endswith("0")))
"""


@pytest.fixture
def start(tmp_path: Path, tiny_model: Path) -> Any:
    """Opens a project on two tasksets of eight tasks and four tasks, four tasks a batch; ``weights`` may be None."""
    (tmp_path / "own.py").write_text(WORKFLOW)
    sums, texts = tmp_path / "sums.jsonl", tmp_path / "texts.jsonl"
    sums.write_text("\n".join(json.dumps({"question": f"{i}+{i}?", "answer": str(2 * i)}) for i in range(8)))
    texts.write_text("\n".join(json.dumps({"text": f"say {i}"}) for i in range(4)))

    def make(home: str = "home", weights: Any = (3, 1), **keys: Any) -> Project:
        one: dict[str, Any] = {"path": str(sums), "task_selector": {"selector_type": "sequential"}}
        two: dict[str, Any] = {
            "path": str(texts),
            "format": {"prompt_key": "text", "response_key": None},
            "workflow": f"{tmp_path / 'own.py'}:asks",
            "rollout_args": {"max_tokens": 2, "temperature": 0.5},
        }
        for taskset, weight in zip((one, two), weights or (), strict=False):
            taskset["weight"] = weight
        data = {
            "model": {"model_path": str(tiny_model), "max_model_len": 64, "max_response_tokens": 4},
            "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
            "buffer": {"batch_size": 4, "explorer_input": {"tasksets": [one | keys, two]}},
            "synchronizer": {"sync_interval": 2},
        }
        return Project(Home(tmp_path / home), build_config(data))

    return make


@pytest.mark.slow
def test_each_taskset_is_run_and_judged_by_its_own_settings(start: Any, policy_engine: PolicyEngine) -> None:
    project = start()
    note = explore(project, policy_engine, serving(policy_engine), 1)
    rows = project.store.rollout_rows(1)
    assert Counter(row.taskset for row in rows) == {"sums": 12, "texts": 4}
    for row in rows:
        text = row.taskset == "texts"
        assert (row.temperature, len(row.response_ids) <= (2 if text else 4)) == (0.5 if text else 1.0, True)
        assert (row.run_reward is not None) == text
    assert len({row.run_id for row in rows}) == 16 and len({row.group_id for row in rows}) == 8
    assert note.task_selection.tasksets == {
        "sums": {"tasks": 6, "epochs": 0.75},
        "texts": {"tasks": 2, "epochs": 0.5},
    }

    summary = judge(project, 1)
    rewards = {row.run_id: row.reward for row in project.store.judged_rows(1, summary.judge_version)}
    own = [row for row in rows if row.taskset == "texts"]
    assert [rewards[row.run_id] for row in own] == [row.run_reward for row in own]
    assert summary.judge_names[summary.judge_version] == "sums: exact_match, texts: workflow"
    assert summary.figures["taskset_rewards"].keys() == {"sums", "texts"}
    assert summary.own_rewards_replaced is None, "the judge of the sums replaces no reward of the texts"


@pytest.mark.slow
def test_failed_runs_are_reported_with_the_most_frequent_error(
    start: Any, policy_engine: PolicyEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    project = start()
    (tmp_path / "own.py").write_text("async def asks(task, model):\n    raise KeyError('no tool')\n")
    note = explore(project, policy_engine, serving(policy_engine), 1)
    assert caplog.messages[-1] == (
        "r0001: 4 of 16 runs failed after all attempts, 2 of 8 tasks are dropped; most frequent error: "
        f"KeyError: 'no tool' ({tmp_path / 'own.py'}:2)"
    )
    assert (note.figures["runs"], note.figures["failed"], note.figures["dropped_groups"]) == (16, 4, 2)


@pytest.mark.slow
def test_a_round_that_was_interrupted_takes_the_same_tasks(start: Any, policy_engine: PolicyEngine) -> None:
    whole, resumed = start("whole"), start("resumed")
    for project in (whole, resumed):
        explore(project, policy_engine, serving(policy_engine), 1)
        judge(project, 1)
    (resumed.store.round_folder(1) / "explore.json").rename(resumed.store.round_folder(1) / "explore.old")
    (resumed.store.round_folder(1) / "judge.json").unlink()
    again = explore(resumed, policy_engine, serving(policy_engine), 1)
    assert again.task_selection == read(whole.store, 1).explored.task_selection
    for project in (whole, resumed):
        explore(project, policy_engine, serving(policy_engine), 2)
    ids = [[(row.run_id, row.task_id, row.response_ids) for row in p.store.rollout_rows(2)] for p in (whole, resumed)]
    assert ids[0] == ids[1]


def test_epochs_are_counted_for_each_taskset(start: Any) -> None:
    """By default the weights are the numbers of tasks, and a pass over all tasks is a pass over each taskset."""
    project = start(weights=None)
    assert mixture_of(project).weights == (8, 4)
    assert project.length.rounds == 2, "twelve tasks, four a batch, two batches a round"
    selection = TaskSelection(project, 1, policy_round=0)
    taken = [task for _ in range(3) for task in selection.next()]
    assert Counter(task.taskset for task in taken) == {"sums": 8, "texts": 4}
    assert len({task.task_id for task in taken}) == 12
    assert [task.raw["answer"] for task in taken if task.taskset == "sums"] == [str(2 * i) for i in range(8)]
    assert selection.taken().tasksets["texts"] == {"tasks": 4, "epochs": 1.0}


def test_one_taskset_is_the_list_with_one_entry(start: Any) -> None:
    inputs = start().config.buffer.explorer_input
    (single, listed) = (
        inputs.model_copy(update={"taskset": inputs.tasksets[0], "tasksets": []}),
        inputs.model_copy(update={"tasksets": inputs.tasksets[:1]}),
    )
    found = []
    for each in (single, listed):
        config = start().config
        config = config.model_copy(update={"buffer": config.buffer.model_copy(update={"explorer_input": each})})
        selection = TaskSelection(Project(start().home, config), 1, policy_round=0)
        found.append([selection.next() for _ in range(5)])
    assert found[0] == found[1]


def test_a_task_of_two_tasksets_has_two_ids(start: Any) -> None:
    project = start()
    first = project.config.buffer.explorer_input.tasksets[0]
    twice = [first, first.model_copy(update={"name": "again", "judge": "numeric"})]
    inputs = project.config.buffer.explorer_input.model_copy(update={"tasksets": twice})
    config = project.config.model_copy(
        update={"buffer": project.config.buffer.model_copy(update={"explorer_input": inputs})}
    )
    tasks = replace(project, config=config).tasks.tasks
    assert len(tasks) == 16 == len({task.task_id for task in tasks})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": (1,)}, r"tasksets\[1\]\.weight is not set, but other tasksets have a weight"),
        ({"name": "texts"}, "two entries are called 'texts'"),
        ({"rollout_args": {"n": 3}}, r"tasksets\[0\]\.rollout_args\.n 3 and algorithm.repeat_times 2 are the same"),
        ({"rollout_args": {"top_p": 0.5}}, r"tasksets\[0\]\.rollout_args\.top_p is 0.5"),
        ({"task_selector": {"feature_keys": ["level"]}}, r"tasksets\[0\]\.task_selector\.feature_keys: shuffle"),
    ],
)
def test_settings_that_do_not_fit_are_refused(start: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        refuse(settings_findings(resolve(start(**change).config), Machine(4, 0)))


def test_the_error_of_a_judge_that_does_not_fit_names_the_taskset(start: Any) -> None:
    with pytest.raises(UserError, match=r"^taskset texts: judge 'contains' compares with a reference answer"):
        judges_of(start(), OtherJudge("contains"))
    assert {name: each.spec is None for name, each in judges_of(start()).items()} == {"sums": False, "texts": True}


def test_a_taskset_beside_the_list_is_refused(start: Any) -> None:
    given = start().config.model_dump(mode="json")
    given["buffer"]["explorer_input"]["taskset"] = given["buffer"]["explorer_input"]["tasksets"][0]
    with pytest.raises(UserError, match="are both set: move the taskset into the list"):
        build_config(given)


@pytest.mark.parametrize("target", ["user@host.1234", ".#train.jsonl"], ids=["an editor's lock", "itself"])
def test_a_folder_with_a_link_to_nothing_is_read(tmp_path: Path, target: str) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    (tmp_path / ".#train.jsonl").symlink_to(target)
    assert [task.prompt for task in load_taskset(Taskset(path=str(tmp_path))).tasks] == ["1+1?"]


def test_a_generated_taskset_with_many_options_has_no_files() -> None:
    path = "reasoning_gym:NAME?" + "&".join(f"option{number}=1" for number in range(40))
    assert stamps(Path(path)) == ()
    assert source_files(path, "train", None) == []
