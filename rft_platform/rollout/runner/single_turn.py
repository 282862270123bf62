"""Batches of a workflow of one model call, whose prompts are sent to the engine together.

Such batches may overlap: a batch ends with enough complete groups, and the next one continues the others. So the engine
is busy to the end of a batch, although few answers are long. A continued answer keeps its tokens with their log-probs
and with the version of the weights that sampled each of them.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter, time
from typing import Any

from rft_platform.common.errors import EngineError
from rft_platform.experience.record import ModelCall, RolloutRow
from rft_platform.inference.interface import (
    Completion,
    EngineStatus,
    FinishReason,
    Generation,
    PartialBatch,
    PolicyEngine,
    SamplingParams,
    greedy,
)
from rft_platform.rollout.recording.history import derive_seed
from rft_platform.rollout.runs.run import ExploreBatch, Run, row_of_call
from rft_platform.rollout.workflow import SingleTurnWorkflow

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(frozen=True, slots=True)
class InFlight:
    """When a batch ends, and the answers that it continues."""

    enough: int  # complete groups that end the batch
    begun: Mapping[tuple[int, int], RolloutRow] = field(default_factory=dict)  # by position of the task and repeat


@dataclass(slots=True)
class _Answer:
    """The answer of a run as far as it was sampled; each token has a log-prob and a version."""

    run: Run
    messages: list[dict[str, Any]]
    prompt_ids: list[int]
    created_at: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "abort"
    duration_s: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason != "abort"

    def resume(self, row: RolloutRow) -> None:
        """Begin with the tokens of an unfinished row."""
        call = row.call
        self.prompt_ids, self.token_ids, self.logprobs = call.prompt_ids, call.response_ids, call.rollout_logprobs
        assert call.policy_version is not None
        self.versions = call.token_versions or [call.policy_version] * len(call.response_ids)
        self.finish_reason = _REASONS[call.finish_reason]
        self.created_at, self.duration_s = call.created_at, call.duration_s

    def add(self, completion: Completion, version: int, seconds: float) -> None:
        """Append newly sampled tokens."""
        self.token_ids = self.token_ids + completion.token_ids
        self.logprobs = self.logprobs + completion.logprobs
        self.versions = self.versions + [version] * len(completion.token_ids)
        self.finish_reason = completion.finish_reason
        self.duration_s += seconds

    def row(self, sampling: SamplingParams, status: EngineStatus, text: str = "") -> RolloutRow:
        """The row of the answer; ``text`` is that of a complete one."""
        several = len(set(self.versions)) > 1
        call = ModelCall(
            msg_id=f"gen-{self.run.run_id}",
            policy_version=self.versions[-1] if self.versions else status.policy_version,
            token_versions=self.versions if several else [],
            prompt_ids=self.prompt_ids,
            response_ids=self.token_ids,
            rollout_logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            messages=self.messages,
            tools=[],
            response={"role": "assistant", "content": text},
            created_at=self.created_at,
            duration_s=self.duration_s,
        )
        row = row_of_call(self.run, 0, call, status)
        row.run_output = text if self.ended else None
        return row


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
    groups, too_long = _answers(engine, workflow, batch, {}, max_prompt_tokens)
    if not groups:
        return [], too_long
    seeded = replace(sampling, seed=_seed(batch), first_prompt=batch.first_prompt)
    started = perf_counter()
    generations = _generate(engine, [group[0].prompt_ids for group in groups.values()], seeded, batch)
    seconds = perf_counter() - started
    for group, generation in zip(groups.values(), generations, strict=True):
        for answer, completion in zip(group, generation.completions, strict=True):
            answer.add(completion, generation.policy_version, seconds)
    ended = [answer for group in groups.values() for answer in group if answer.ended]
    return _rows(engine, status, sampling, ended), too_long


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


def run_in_flight(
    engine: PolicyEngine,
    status: EngineStatus,
    workflow: SingleTurnWorkflow,
    batch: ExploreBatch,
    sampling: SamplingParams,
    in_flight: InFlight,
    max_prompt_tokens: int | None = None,
) -> tuple[list[RolloutRow], list[RolloutRow], list[Run]]:
    """Sample until ``in_flight.enough`` groups are complete.

    Returns the rows of these groups, those of the other groups as far as they were sampled, and the runs whose prompt
    is too long. If more groups complete at the same moment, the first ones count. Raises EngineError if the engine
    aborts all answers.
    """
    groups, too_long = _answers(engine, workflow, batch, in_flight.begun, max_prompt_tokens)
    enough, calls = min(in_flight.enough, len(groups)), 0
    while (missing := enough - sum(_is_complete(group) for group in groups.values())) > 0:
        at_once = in_flight.enough * batch.repeat_times
        _sample(engine, groups, missing, at_once, replace(sampling, n=1, seed=_seed(batch, calls)))
        calls += 1
    complete = [index for index, group in groups.items() if _is_complete(group)][:enough]
    rows = _rows(engine, status, sampling, [answer for index in complete for answer in groups[index]])
    others = [answer for index in groups.keys() - set(complete) for answer in groups[index]]
    others.sort(key=lambda answer: (answer.run.index, answer.run.repeat))
    return rows, [answer.row(sampling, status) for answer in others], too_long


def _rows(
    engine: PolicyEngine, status: EngineStatus, sampling: SamplingParams, ended: Sequence[_Answer]
) -> list[RolloutRow]:
    texts = engine.decode([answer.token_ids for answer in ended])
    return [answer.row(answer.run.sampling(sampling), status, text) for answer, text in zip(ended, texts, strict=True)]


def _seed(batch: ExploreBatch, calls: int = 0) -> int:
    """Each call of the engine has a different seed: a continuation must not repeat the random numbers of its start."""
    return derive_seed(batch.seed, batch.round, batch.number, *([calls] if calls else []))


def _answers(
    engine: PolicyEngine,
    workflow: SingleTurnWorkflow,
    batch: ExploreBatch,
    begun: Mapping[tuple[int, int], RolloutRow],
    max_prompt_tokens: int | None,
) -> tuple[dict[int, list[_Answer]], list[Run]]:
    """The answers of each group, in run order, by the position of its task; and the runs whose prompt is too long."""
    conversations = [workflow.messages(task) for task in batch.tasks]
    prompts, now = list(zip(conversations, engine.render(conversations), strict=True)), time()
    groups: dict[int, list[_Answer]] = defaultdict(list)
    too_long = []
    for number, run in enumerate(batch.runs()):
        messages, prompt = prompts[number // batch.repeat_times]
        if max_prompt_tokens is not None and len(prompt) > max_prompt_tokens:
            too_long.append(run)
            continue
        answer = _Answer(run, messages, prompt, now)
        if (row := begun.get((run.index, run.repeat))) is not None:
            answer.resume(row)
        groups[run.index].append(answer)
    return dict(groups), too_long


def _is_complete(group: Sequence[_Answer]) -> bool:
    return all(answer.ended for answer in group)


def _sample(
    engine: PolicyEngine, groups: Mapping[int, Sequence[_Answer]], missing: int, at_once: int, sampling: SamplingParams
) -> None:
    """Sample on, in one call of the engine, until ``missing`` further groups are complete.

    ``at_once`` answers are sampled at the same time. If all were, the tasks of the next batch would end with those of
    this one: one batch would take twice as long, and the next one no time.
    """
    unfinished = [answer for group in groups.values() for answer in group if not answer.ended]
    prompts = [answer.prompt_ids + answer.token_ids for answer in unfinished]
    sampled = [len(answer.token_ids) for answer in unfinished]
    partial = PartialBatch([answer.run.index for answer in unfinished], missing, at_once, sampled)
    started = perf_counter()
    generations = engine.generate(prompts, sampling, partial)
    seconds = perf_counter() - started
    for answer, generation in zip(unfinished, generations, strict=True):
        answer.add(generation.completions[0], generation.policy_version, seconds)
    if not any(generation.completions[0].token_ids for generation in generations):
        raise EngineError("the engine aborted every answer")
