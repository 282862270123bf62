"""Counts, costs and errors of a batch of rollouts."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from rft_platform.common.fault_classification import described, user_place
from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.experience.record import TRUNCATED_METRIC, UNFINISHED_METRIC, RolloutRow, valid_text
from rft_platform.rollout.runs.attempt import RemoteFailure
from rft_platform.rollout.runs.run import Run

LOG = logging.getLogger(__name__)
_PREVIOUS_CALLS = 8  # earlier calls to compare: if sub-agents alternate, a call may continue an older one

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """Counts and costs of one or more explore batches. Token counts include only rows that are kept."""

    runs: int  # requested runs: tasks times repeats
    failed: int  # runs without rows after all attempts
    stopped: int  # runs stopped without rows because enough tasks were done (over_rollout)
    retried: int  # further attempts after the first one of each run
    dropped_groups: int  # tasks without rows, because one or all of their runs failed or were stopped
    partial_groups: int  # tasks kept with only some of their runs (group_policy partial)
    rows: int
    truncated_rows: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float  # wall clock
    cpu_s: float  # processor time of the driver
    engine_cpu_s: float  # processor time of the engine's server
    client_retries: int = 0  # HTTP requests that a client retried
    policy_versions: tuple[int, ...] = ()  # of the first policy, ascending; several if weights changed
    errors: dict[str, int] = field(default_factory=dict)  # failed attempts by error
    error_places: dict[str, str] = field(default_factory=dict)  # `` (file:line)`` of the first attempt, by error
    dropped_for: dict[str, int] = field(default_factory=dict)  # dropped_groups by reason
    context_truncated: int = 0  # runs of the rows that ended because they exceeded the context
    unfinished_calls: int = 0  # unrecorded calls of kept runs: cancelled or not awaited by the agent
    constrained_rows: int = 0  # rows sampled under a grammar, which are not trained on
    later_prompt_tokens: int = 0  # prompt tokens of all calls except the first of each run
    continued_rows: int = 0  # rows whose answer several versions of the weights sampled (batches_in_flight)
    unfinished_groups: int = 0  # tasks that the next batch continues (batches_in_flight)
    shared_prefix_tokens: int = 0  # those of later_prompt_tokens that repeat an earlier call of the run

    @property
    def shared_prefix_share(self) -> float | None:
        """Share of the prompt tokens of later calls that repeat an earlier call; low if an agent rewrites its history.

        A later call is every call of a run except the first. None if there is no later call.
        """
        return self.shared_prefix_tokens / self.later_prompt_tokens if self.later_prompt_tokens else None

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0

    @property
    def truncated_share(self) -> float:
        """Share of rows that ended at their token limit."""
        return self.truncated_rows / self.rows if self.rows else 0.0

    def failures(self, repeat_times: int) -> str | None:
        """How many runs failed, the tasks dropped for it, and the most frequent error; None if no run failed."""
        if not self.failed:
            return None
        said = f"{self.failed:,} of {self.runs:,} runs failed after all attempts"
        if dropped := self.dropped_for.get("failed"):
            said += f", {dropped:,} of {self.runs // repeat_times:,} tasks are dropped"
        if self.errors:
            error = max(self.errors, key=self.errors.__getitem__)
            said += f"; most frequent error: {error}{self.error_places.get(error, '')}"
        return said

    def as_dict(self) -> dict[str, Any]:
        """All fields and derived figures, JSON-serialisable."""
        derived: dict[str, float | None] = {"tokens_per_s": self.tokens_per_s, "truncated_share": self.truncated_share}
        derived["shared_prefix_share"] = self.shared_prefix_share
        return {**asdict(self), "policy_versions": list(self.policy_versions), **derived}

    @classmethod
    def merge(cls, reports: Sequence["RolloutReport"]) -> "RolloutReport":
        """Merge the reports of batches that ran one after the other."""
        totals = {name: sum(getattr(report, name) for report in reports) for name in _SUMMED}
        versions = sorted({version for report in reports for version in report.policy_versions})
        errors = sum((Counter(report.errors) for report in reports), Counter[str]())
        dropped_for = sum((Counter(report.dropped_for) for report in reports), Counter[str]())
        return cls(
            **totals,
            policy_versions=tuple(versions),
            errors=dict(errors),
            error_places={error: place for report in reports for error, place in report.error_places.items()},
            dropped_for=dict(dropped_for),
        )


_ERRORS_REPORTED = 20
_ERROR_CHARACTERS = 200
_SUMMED = [item.name for item in fields(RolloutReport) if item.type in (int, float)]


@dataclass(slots=True)
class Tally:
    """Failures, retries and stopped runs of a batch."""

    retried: int = 0
    stopped_runs: list[str] = field(default_factory=list)  # ids of the runs that were not waited for
    client_retries: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    places: dict[str, str] = field(default_factory=dict)
    last_error: BaseException | None = None

    def add_failure(self, run: Run, attempt: int, error: BaseException) -> None:
        """Count a failed attempt. The first of each kind of error is logged as a warning, with run, task and place."""
        message = error_text(error)[:_ERROR_CHARACTERS]
        level = logging.DEBUG if message in self.errors else logging.WARNING
        self.errors[message] += 1
        self.last_error = error
        failed = f"run {run.run_id} of task {run.task.task_id}, attempt {attempt} failed"
        LOG.log(level, "%s: %s%s", failed, message, self.places.setdefault(message, user_location(error)))

    def counts(self) -> dict[str, Any]:
        """Return the report fields that this object counts. ``errors`` has only the most frequent kinds of error."""
        errors = dict(self.errors.most_common(_ERRORS_REPORTED))
        return {
            "retried": self.retried,
            "stopped": len(self.stopped_runs),
            "client_retries": self.client_retries,
            "errors": errors,
            "error_places": {error: self.places[error] for error in errors if self.places[error]},
        }


def error_text(error: BaseException) -> str:
    """Text of an attempt's error for notes and logs; the error may come from this process or from a worker."""
    return valid_text(str(error) if isinstance(error, RemoteFailure) else described(error))


def user_location(error: BaseException) -> str:
    """`` (file:line)`` of the user's code in which an attempt failed or waited; empty if unknown."""
    place = error.location if isinstance(error, RemoteFailure) else user_place(error)
    return f" ({place})" if place else ""


@dataclass(slots=True)
class RolloutBatch:
    """The rows of an explore batch, in run order, and its report."""

    rows: list[RolloutRow]
    report: RolloutReport
    last_error: BaseException | None = None  # of the attempts that failed
    unfinished: list[RolloutRow] = field(default_factory=list)  # answers for the next batch (``batches_in_flight``)


def row_counts(rows: Iterable[RolloutRow]) -> dict[str, Any]:
    """Return the report fields that depend on the rows alone."""
    kept = list(rows)
    shared, later = shared_prefix_tokens(kept)
    versions = (row.call.policy_version for row in kept if row.call.policy == DEFAULT_POLICY)
    unfinished = (row.call.metrics.get(UNFINISHED_METRIC, 0) for row in kept)
    return {
        "shared_prefix_tokens": shared,
        "later_prompt_tokens": later,
        "rows": len(kept),
        "truncated_rows": sum(row.truncated for row in kept),
        "prompt_tokens": sum(len(row.call.prompt_ids) for row in kept),
        "completion_tokens": sum(len(row.call.response_ids) for row in kept),
        "policy_versions": tuple(sorted({version for version in versions if version is not None})),
        "context_truncated": sum(TRUNCATED_METRIC in row.call.metrics for row in kept),
        "unfinished_calls": int(sum(filter(math.isfinite, unfinished))),
        "continued_rows": sum(bool(row.call.token_versions) for row in kept),
        "constrained_rows": sum(bool(row.loss_mask) and not any(row.loss_mask) for row in kept),
    }


def shared_prefix_tokens(rows: Iterable[RolloutRow]) -> tuple[int, int]:
    """Return (shared prompt tokens, all prompt tokens), both summed over the later calls of the runs.

    A later call is every call of a run except the first. The shared tokens of its prompt are the longest common prefix
    with the prompt and answer of an earlier call of the run. The trainer's packs and a prefix cache compute them only
    once. Nearly all tokens are shared if an agent appends to its history, few if the agent or its template rewrites the
    history. The rows of a run must be adjacent, as the runner returns them. A call with several choices counts once.
    """
    shared = total = 0
    for _, run in groupby(rows, key=lambda row: row.run_id):
        earlier: list[Ids] = []
        for step, call in groupby(run, key=lambda row: row.step):
            choices = list(call)
            prompt = np.asarray(choices[0].call.prompt_ids, np.int32)
            if step > 0:
                total += len(prompt)
                shared += _longest(prompt, earlier)
            earlier += [np.asarray([*row.call.prompt_ids, *row.call.response_ids], np.int32) for row in choices]
            del earlier[:-_PREVIOUS_CALLS]
    return shared, total


def _longest(prompt: Ids, earlier: Sequence[Ids]) -> int:
    """Length of the longest prefix that ``prompt`` shares with any of the ``earlier`` sequences."""
    longest = 0
    for other in reversed(earlier):
        size = min(len(prompt), len(other))
        differ = np.flatnonzero(prompt[:size] != other[:size])
        longest = max(longest, int(differ[0]) if len(differ) else size)
        if longest == size:
            break
    return longest
