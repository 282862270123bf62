"""``tune_prompt()`` searches for the system prompt with which a workflow solves a dataset's tasks best."""

import asyncio
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from rft_platform.common.errors import UserCodeError, UserError
from rft_platform.common.fault_classification import described
from rft_platform.common.threads import DaemonThreads
from rft_platform.common.user_code import check_parameters
from rft_platform.evaluation.prompt_search import FailureReward, PromptRun, search_prompts
from rft_platform.judging.types import check_judge_function
from rft_platform.tuner.calls import call_function, tasks_of
from rft_platform.tuner.sections import DatasetConfig, TunerSection
from rft_platform.tuner.tuning import outside_event_loop
from rft_platform.tuner.types import JudgeType, WorkflowType

_log = logging.getLogger(__name__)

#: Providers by the prefix of a model's name: variables with the address, the default address, variable with the key.
_PROVIDERS = {
    "openai": (("OPENAI_BASE_URL", "OPENAI_API_BASE"), "https://api.openai.com/v1", "OPENAI_API_KEY"),
    "dashscope": (
        ("DASHSCOPE_API_BASE",),
        "https://dashscope.aliyuncs.com/compatible-mode/v1",
        "DASHSCOPE_API_KEY",
    ),
}
#: Tasks that the search measures prompts on, and prompts that it can measure on all of them, by optimization_level.
_LEVELS = {"light": (32, 6), "medium": (64, 12), "heavy": (128, 18)}
_MINIBATCH = 4
_SHOWN = 2000  # characters of a task or a response that the model reads


class PromptTuneConfig(TunerSection):
    """Settings of ``tune_prompt()``."""

    lm_model_name: str = "dashscope/qwen-plus"
    """The model that proposes prompts: ``openai/NAME`` or ``dashscope/NAME``. ``OPENAI_BASE_URL`` may name any
    endpoint of OpenAI's API; the keys are in ``OPENAI_API_KEY`` and ``DASHSCOPE_API_KEY``."""
    optimization_level: Literal["light", "medium", "heavy"] | None = "light"
    """How long the search is: 32, 64 or 128 tasks, with runs for about 6, 12 or 18 prompts."""
    eval_display_progress: bool = True
    """Log the mean reward of each measurement of a prompt."""
    eval_display_table: int = Field(default=5, ge=0)
    """Print the rewards of so many tasks of ``eval_dataset``, one a line."""
    eval_num_threads: int = Field(default=16, ge=1)
    """Maximum number of tasks that run at the same time."""
    compare_performance: bool = True
    """Measure the starting prompt on ``eval_dataset``, too."""


def tune_prompt(
    *,
    workflow: WorkflowType,
    init_system_prompt: str,
    judge_func: JudgeType,
    train_dataset: DatasetConfig,
    eval_dataset: DatasetConfig | None = None,
    config: PromptTuneConfig | None = None,
) -> tuple[str, dict[str, float]]:
    """Return a better system prompt and, with ``eval_dataset``, its gain there as ``valset_improvement`` in percent.

    ``workflow`` has the parameters ``task`` and ``system_prompt`` and calls models by itself; its own reward is not
    used. ``judge_func`` has ``task``, ``response`` [, ``auxiliary_models``, which is empty] [, ``logger``]. A task
    whose workflow or judge fails counts 0, or as much as the worst reward so far if that is negative. The gain is left
    out if the starting prompt has a mean reward of 0.

    Raises:
        ValueError: a function's parameters are not those of a workflow or a judge.
        UserError: the model's name, its key or a dataset cannot be used.
        UserCodeError: workflow or judge failed on every task with the starting prompt.
    """
    check_parameters(workflow, "Workflow function", ("task", "system_prompt"), ())
    check_judge_function(judge_func)
    settings = config or PromptTuneConfig()
    reflect = _reflection(settings.lm_model_name)
    count, prompts = _LEVELS[settings.optimization_level or "light"]
    tasks = tasks_of(train_dataset, count)
    held_out = [] if eval_dataset is None else tasks_of(eval_dataset, None)

    def tuned() -> tuple[str, dict[str, float]]:
        with asyncio.Runner() as runner:
            # For functions that call asyncio.to_thread: the loop's own threads may be fewer than eval_num_threads.
            runner.get_loop().set_default_executor(DaemonThreads("prompt-tuning"))
            judged = _Judged(workflow, judge_func, settings, runner)
            runs = prompts * (len(tasks) + 2 * _MINIBATCH)
            found = search_prompts(judged.runs, tasks, init_system_prompt, reflect, runs=runs, minibatch=_MINIBATCH)
            best = found.best.text
            return best, judged.improvement(init_system_prompt, best, held_out) if held_out else {}

    return outside_event_loop(tuned)


class _Judged:
    """Judged runs of the workflow, in one event loop, so that its clients may live as long as the search."""

    def __init__(
        self, workflow: WorkflowType, judge: JudgeType, settings: PromptTuneConfig, runner: asyncio.Runner
    ) -> None:
        self._workflow, self._judge, self._settings, self._runner = workflow, judge, settings, runner
        self._succeeded = False
        self._failure = FailureReward()

    def runs(self, prompt: str, tasks: Sequence[dict[str, Any]]) -> list[PromptRun]:
        """One run of each task. Raises UserCodeError if the first call has no run that did not fail."""
        made = self._counted(self._runner.run(self._all(prompt, tasks)))
        failures = [run.record["error"] for run in made if "error" in run.record]
        if len(failures) == len(made) and not self._succeeded:
            raise UserCodeError(f"tune_prompt: workflow or judge failed on every task; the first error: {failures[0]}")
        self._succeeded = True
        if self._settings.eval_display_progress:
            _log.info("mean reward %.4f on %d tasks", fmean(run.reward for run in made), len(made))
        return made

    def _counted(self, made: list[PromptRun]) -> list[PromptRun]:
        """The runs; failed ones with the reward that a failure counts."""
        failed = self._failure.after(run.reward for run in made if "error" not in run.record)
        return [replace(run, reward=failed) if "error" in run.record else run for run in made]

    def improvement(self, start: str, best: str, tasks: Sequence[dict[str, Any]]) -> dict[str, float]:
        """The gain of the best prompt over the starting one, in percent of the latter; empty without one."""
        found = self.runs(best, tasks)
        for task, run in islice(zip(tasks, found, strict=True), self._settings.eval_display_table):
            print(f"{run.reward:.4g}\t{_shown(task)[:100]}")
        if not self._settings.compare_performance:
            return {}
        before, after = (fmean(run.reward for run in runs) for runs in (self.runs(start, tasks), found))
        return {"valset_improvement": 100 * (after - before) / abs(before)} if before else {}

    async def _all(self, prompt: str, tasks: Sequence[dict[str, Any]]) -> list[PromptRun]:
        slots = asyncio.Semaphore(self._settings.eval_num_threads)
        return await asyncio.gather(*(self._one(prompt, task, slots) for task in tasks))

    async def _one(self, prompt: str, task: dict[str, Any], slots: asyncio.Semaphore) -> PromptRun:
        async with slots:
            try:
                output = await call_function(self._workflow, task=dict(task), system_prompt=prompt)
                judged = await call_function(self._judge, task=task, response=output.response)
                reward = float(judged.reward)
                if not math.isfinite(reward):
                    raise ValueError(f"the reward is {reward}; expected a finite number")
                return PromptRun(reward, {"task": _shown(task), "response": _shown(output.response)})
            except Exception as error:  # user code may raise anything
                return PromptRun(0.0, {"task": _shown(task), "error": described(error)})


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"


def _reflection(name: str) -> Callable[[str], str]:
    """A question to the model ``provider/NAME``. Raises UserError for an unknown provider or a missing key."""
    import openai

    from rft_platform.common.redaction import hide

    provider, _, model = name.partition("/")
    if provider not in _PROVIDERS or not model:
        raise UserError(
            f"lm_model_name {name!r}: expected openai/NAME or dashscope/NAME; for another provider with OpenAI's API "
            "set OPENAI_BASE_URL and OPENAI_API_KEY and give openai/NAME"
        )
    addresses, default, key = _PROVIDERS[provider]
    if not os.environ.get(key):
        raise UserError(f"lm_model_name {name!r}: the environment variable {key} is not set; export the key in it")
    hide(os.environ[key])
    address = next((os.environ[each] for each in addresses if os.environ.get(each)), default)
    client = openai.OpenAI(base_url=address, api_key=os.environ[key], max_retries=4, timeout=300)

    def reflect(question: str) -> str:
        try:
            answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": question}])
        except openai.OpenAIError as error:
            raise UserError(f"tune_prompt: the model {model!r} at {address} failed: {described(error)}") from error
        return (answer.choices[0].message.content if answer.choices else None) or ""

    return reflect
