"""The section ``prompt_search``: what is refused before a start, and which tasks a search uses."""

from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.prompt_search import _prepared, check_prompt_search
from rft_platform.run.data_checks import prompt_problems
from rft_platform.tasks.task import ORIGIN
from tests.support.builders import write_rows

MODEL = {"base_url": "http://127.0.0.1:1/v1", "model": "m"}


def project(
    folder: Path, search: dict[str, Any] | None, rows: list[dict[str, Any]] | None = None, **set_: Any
) -> Project:
    """A project of 40 tasks, whose taskset has the keys ``set_``."""
    given = rows or [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(40)]
    taskset = {"path": write_rows(folder / "tasks.jsonl", given), "format": {"system_prompt": "Add."}, **set_}
    inputs = {"taskset": taskset, "eval_tasksets": [{**taskset, "name": "held-out"}]}
    config = {"model": {"model_path": "m"}, "buffer": {"total_steps": 1, "explorer_input": inputs}}
    return Project(Home(folder / "home"), build_config({**config, **({"prompt_search": search} if search else {})}))


def test_tasks_are_drawn_with_the_seed_and_the_prompt_of_the_taskset_is_the_start(tmp_path: Path) -> None:
    first = _prepared(project(tmp_path, {"reflection": {"model": MODEL}, "tasks": 8}))
    again = _prepared(project(tmp_path, {"reflection": {"model": MODEL}, "tasks": 8}))
    assert first.start == "Add." and len({task.task_id for task in first.dataset.tasks}) == 8
    assert first.dataset.tasks == again.dataset.tasks != project(tmp_path, None).tasks.tasks[:8]
    assert (first.reflection.temperature, first.reflection.max_tokens) == (1.0, 4096)
    given = _prepared(project(tmp_path, {"reflection": {"model": MODEL, "temperature": 0.5}, "start": "Sum."}))
    assert (given.start, given.reflection.temperature, len(given.dataset.tasks)) == ("Sum.", 0.5, 32)


def test_tasks_of_imported_traces_are_left_out(tmp_path: Path) -> None:
    own = {"question": "1+1=", "answer": "2"}
    imported = {"question": "Ann asks 1+2=", "answer": "3", ORIGIN: [{"id": "t"}]}
    search = {"reflection": {"model": MODEL}}
    assert [task.prompt for task in _prepared(project(tmp_path, search, [imported, own])).dataset.tasks] == ["1+1="]
    with pytest.raises(UserError, match="all tasks are of imported traces"):
        check_prompt_search(project(tmp_path, search, [imported]))


def test_a_training_on_a_dataset_is_refused(tmp_path: Path) -> None:
    opened = project(tmp_path, {"reflection": {"model": MODEL}})
    algorithm = opened.config.algorithm.model_copy(update={"algorithm_type": "sft"})
    offline = opened.config.model_copy(update={"mode": "train", "algorithm": algorithm})
    with pytest.raises(UserError, match="algorithm_type sft with mode train trains on a dataset"):
        check_prompt_search(Project(opened.home, offline))


def test_tasks_with_a_system_message_of_their_own_are_refused(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    search = {"reflection": {"model": MODEL}}
    with pytest.raises(UserError, match=r"1 tasks of .*tasks\.jsonl have a system message of their own"):
        check_prompt_search(project(tmp_path, search, [{"question": prompt, "answer": "2"}]))


@pytest.mark.parametrize(
    ("search", "taskset", "message"),
    [
        (None, {}, "no prompt_search in the configuration"),
        ({"reflection": {"model": MODEL}}, {"format": {}}, "prompt_search.start is not set"),
        (
            {"reflection": {"model": MODEL}},
            {"workflow": "tool_call", "judge": "numeric"},
            "tool_call takes no system prompt",
        ),
        ({"reflection": {"model": "helper"}}, {}, "'helper' is not one of explorer.auxiliary_models"),
        ({"reflection": {"model": MODEL, "temperature": -1}}, {}, "prompt_search.reflection.temperature: .*got -1"),
        ({"reflection": {"model": 5}}, {}, "prompt_search.reflection.model: Input should be a valid string, got 5"),
        ({"reflection": {"model": {"base_url": "x"}}}, {}, "^prompt_search.reflection.model.model: Field required$"),
        ({"reflection": {"model": {**MODEL, "key": "k"}}}, {}, "^prompt_search.reflection.model.key: Extra [^']*$"),
        ({"reflection": {"model": MODEL}, "runs": 32}, {}, "prompt_search.runs is 32, .* on 32 tasks .* 33 or more"),
        (
            {"reflection": {"model": MODEL}},
            {"workflow": "calculator", "workflow_args": {"system_prompt": "Add."}},
            "workflow_args.system_prompt of .*tasks.jsonl would replace every prompt",
        ),
        (
            {"reflection": {"model": {**MODEL, "api_key_env": "RFT_NO_KEY"}}},
            {},
            "^prompt_search.reflection: the reflection model 'm': .* RFT_NO_KEY is not set",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(
    tmp_path: Path, search: dict[str, Any] | None, taskset: dict[str, Any], message: str
) -> None:
    opened = project(tmp_path, search, **taskset)
    with pytest.raises(UserError, match=message):
        check_prompt_search(opened)
    assert [finding.level for finding in prompt_problems(opened)] == (["error"] if search else [])
