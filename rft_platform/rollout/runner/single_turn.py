"""The built-in single-turn workflow, and the batch path for all workflows of one model call."""

from dataclasses import dataclass, replace
from time import perf_counter, time
from typing import Any

from rft_platform.experience.record import ModelCall, RolloutRow
from rft_platform.inference.interface import EngineStatus, Generation, PolicyEngine, SamplingParams, greedy
from rft_platform.rollout.recording.run_ids import derive_seed
from rft_platform.rollout.runs.run import ExploreBatch, Run, row_of_call
from rft_platform.rollout.workflow import SingleTurnWorkflow
from rft_platform.tasks.task import Task


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """Sends the task's prompt, after an optional system prompt; the answer is the run's output."""

    system_prompt: str | None = None

    def messages(self, task: Task) -> list[dict[str, Any]]:
        """The conversation that the answer continues."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": task.prompt}]


def run_single_turn(
    engine: PolicyEngine,
    status: EngineStatus,
    workflow: SingleTurnWorkflow,
    batch: ExploreBatch,
    sampling: SamplingParams,
    max_prompt_tokens: int | None = None,
) -> tuple[list[RolloutRow], list[Run]]:
    """Return one row for each answer that the engine did not abort, and the runs whose prompt is too long.

    A prompt of more than ``max_prompt_tokens`` is not sampled. The whole batch takes three engine calls: render all
    prompts, sample all groups, decode all answers. Greedy runs are a call more.
    """
    conversations = [workflow.messages(task) for task in batch.tasks]
    rendered = engine.render(conversations)
    fits = [max_prompt_tokens is None or len(prompt) <= max_prompt_tokens for prompt in rendered]
    fitting_runs = [fitting for fitting in fits for _ in range(batch.repeat_times)]
    too_long = [run for run, fitting in zip(batch.runs(), fitting_runs, strict=True) if not fitting]
    if not any(fits):
        return [], too_long
    prompts = [prompt for prompt, fitting in zip(rendered, fits, strict=True) if fitting]
    conversations = [messages for messages, fitting in zip(conversations, fits, strict=True) if fitting]
    seeded = replace(sampling, seed=derive_seed(batch.seed, batch.round, batch.number), first_prompt=batch.first_prompt)
    created_at, started = time(), perf_counter()
    generations = _generate(engine, prompts, seeded, batch)
    duration_s = perf_counter() - started
    sampled = [
        (conversation, generation, completion)
        for conversation, generation in zip(conversations, generations, strict=True)
        for completion in generation.completions
    ]
    texts = engine.decode([completion.token_ids for _, _, completion in sampled])
    runs, rows = [run for run, fitting in zip(batch.runs(), fitting_runs, strict=True) if fitting], []
    for run, (messages, generation, completion), text in zip(runs, sampled, texts, strict=True):
        if completion.finish_reason == "abort":
            continue
        call = ModelCall(
            msg_id=f"gen-{run.run_id}",
            policy_version=generation.policy_version,
            prompt_ids=generation.prompt_ids,
            response_ids=completion.token_ids,
            rollout_logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            temperature=run.sampling(sampling).temperature,
            top_p=run.sampling(sampling).top_p,
            top_k=run.sampling(sampling).top_k,
            messages=messages,
            tools=[],
            response={"role": "assistant", "content": text},
            created_at=created_at,
            duration_s=duration_s,
        )
        row = row_of_call(run, 0, call, status)
        row.run_output = text
        rows.append(row)
    return rows, too_long


def _generate(
    engine: PolicyEngine, prompts: list[list[int]], sampling: SamplingParams, batch: ExploreBatch
) -> list[Generation]:
    """The completions of every prompt, one for each run of its task, in the order of the runs."""
    if not batch.greedy_first:
        return engine.generate(prompts, replace(sampling, n=batch.repeat_times))
    first = engine.generate(prompts, replace(greedy(sampling), n=1))
    if batch.repeat_times == 1:
        return first
    others = engine.generate(prompts, replace(sampling, n=batch.repeat_times - 1))
    return [
        replace(sampled, completions=[*best.completions, *sampled.completions])
        for best, sampled in zip(first, others, strict=True)
    ]
