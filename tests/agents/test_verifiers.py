"""The example verifiers with tools: verifiers starts the taskset's tool server, and its trace gives the reward."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.rollout_limits import RolloutLimits
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.runner.run_rollouts import run_rollouts
from rft_platform.rollout.workers.import_check import check_importable
from rft_platform.rollout.workflow import WorkerWorkflow
from rft_platform.tasks.task import Task

from .conftest import EXAMPLES
from .teacher import ANSWER, EXPRESSION, Teacher

WORKFLOW = f"{EXAMPLES / 'verifiers' / 'workflow.py'}:VerifiersWorkflow"
PYTHON = Path(os.environ.get("RFT_AGENT_ENVS") or EXAMPLES) / "verifiers" / ".venv" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no examples/verifiers/.venv (examples/verifiers/setup.sh)"),
]


@pytest.fixture
def teacher() -> Iterator[Teacher]:
    """An engine that calls the calculator, and then answers."""
    engine = Teacher()
    engine.serve()
    yield engine
    engine.shutdown()


def test_the_tool_of_a_taskset_is_called(teacher: Teacher, tmp_path: Path) -> None:
    row = json.loads((EXAMPLES / "verifiers" / "arithmetic.jsonl").read_text().splitlines()[0])
    changed = {**row, "key": "of a former version"}
    arguments = {"taskset": "arithmetic", "taskset_args": {"task": {"calculator": True}}}
    batch = run_rollouts(
        teacher,
        [Task("task", "arithmetic", row["question"], None, row), Task("other", "arithmetic", "", None, changed)],
        WorkerWorkflow(WORKFLOW, arguments, python=str(PYTHON), count=1, log_folder=tmp_path),
        round=1, batch=0, repeat_times=1,
        sampling=SamplingParams(max_tokens=64, temperature=0.0),
        limits=RolloutLimits(timeout_s=120, max_retries=0, group_policy="partial"),
    )  # fmt: skip
    calling, answering = batch.rows
    assert calling.messages == [{"role": "user", "content": row["question"]}]
    assert json.loads(calling.response["tool_calls"][0]["function"]["arguments"]) == {"expression": EXPRESSION}
    assert answering.messages[-1]["content"] == ANSWER, "the result of the taskset's own tool"
    assert (answering.run_output, answering.run_reward) == (ANSWER, pytest.approx(0.1)), (
        "short, and not the right number"
    )
    assert answering.metrics["turns"] == 2.0 and answering.metrics["right"] == 0.0
    assert batch.report.failed == 1 and "is not the one of this row" in json.dumps(batch.report.errors)


def test_an_unknown_taskset_is_refused_before_a_start() -> None:
    with pytest.raises(UserError, match="taskset 'nothing_here' not found"):
        check_importable(WorkerWorkflow(WORKFLOW, {"taskset": "nothing_here"}, python=str(PYTHON)))
