"""Tasks and workflows that the tests of the runner share."""

from collections.abc import Mapping, Sequence
from typing import Any

from rft_platform.config.rollout_limits import RolloutLimits
from rft_platform.inference.interface import SamplingParams
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.runner.report import RolloutBatch
from rft_platform.rollout.runner.run_rollouts import run_rollouts
from rft_platform.rollout.workflow import WorkflowOutput
from rft_platform.tasks.task import Task

NOT_CALLABLE = 3


def tasks(count: int) -> list[Task]:
    """``count`` different tasks."""
    return [Task(f"task-{n}", "set", f"question {n}", str(n), {"question": f"question {n}"}) for n in range(count)]


async def ask_once(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """One call; the answer is the response."""
    message = await model.chat([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=message["content"])


def ask_blocking(task: dict[str, Any], model: ModelHandle) -> WorkflowOutput:
    """The same for a framework that blocks."""
    messages: Any = [{"role": "user", "content": task["question"]}]
    answer = model.get_openai_client().chat.completions.create(model=model.model_name, messages=messages)
    return WorkflowOutput(response=answer.choices[0].message.content)


async def misspelt(task: dict[str, Any], modle: ModelHandle) -> WorkflowOutput:
    """A parameter name that no runner knows."""
    return WorkflowOutput()


class Custom:
    """A workflow object with an argument."""

    def __init__(self, turns: int, system_prompt: str | None = None) -> None:
        self.turns, self.system_prompt = int(turns), system_prompt

    async def run(
        self, task: Task, model: ModelHandle, auxiliary_models: Mapping[str, Any] | None = None
    ) -> WorkflowOutput:
        """Two calls and its own reward."""
        for turn in range(self.turns):
            await model.chat([{"role": "user", "content": f"{task.prompt}, turn {turn}"}])
        return WorkflowOutput(reward=0.5, response={"turns": self.turns}, metrics={"turns": self.turns})


def roll_out(engine: Any, given: Sequence[Task], workflow: Any, **options: Any) -> RolloutBatch:
    """``run_rollouts`` on small answers; options that are limits of runs go into its ``limits``."""
    own = {"round": 1, "batch": 0, "repeat_times": 2, "sampling": SamplingParams(max_tokens=64), **options}
    limits = {name: own.pop(name) for name in RolloutLimits.__dataclass_fields__ if name in own}
    return run_rollouts(engine, given, workflow, limits=RolloutLimits(**limits), **own)
