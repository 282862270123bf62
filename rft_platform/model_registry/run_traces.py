"""Write runs of a workflow to MLflow as traces: a span for each model call, and rewards as assessments.

Traces of production traffic have no messages. The feedback of users, with comments, are further assessments;
``delete_traces`` removes them when a person is forgotten.
"""

import logging
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rft_platform.cluster.this_process import importing
from rft_platform.common.errors import RegistryError
from rft_platform.common.sqlite_files import compact
from rft_platform.model_registry.mlflow_client import OPENING, back_up
from rft_platform.model_registry.tracking import TrainingRun

if TYPE_CHECKING:
    from mlflow.entities import Trace

    from rft_platform.experience.record import RolloutRow

LOG = logging.getLogger(__name__)
RUN_TAG = "rft.workflow_run"
ROUND_TAG = "rft.round"
FEEDBACK_ID = "rft.feedback_id"  #: metadata of a user's assessment
_URI = "MLFLOW_TRACKING_URI"
_PAGE = 500  # traces of an answer of MLflow, which permits no more


@dataclass(frozen=True, slots=True)
class JudgedTranscript:
    """A run of a workflow with the rewards of a judge."""

    calls: Sequence["RolloutRow"]  # in the order of the run; at least one
    rewards: Mapping[str, float]  # the reward and its parts, by name
    judge: str  # name and version
    by_model: bool  # whether a language model judged
    dropped_by: str | None = None
    with_texts: bool = True  # false for production traffic: `rft forget` must be able to erase all text
    feedback: Sequence["GivenFeedback"] = ()


@dataclass(frozen=True, slots=True)
class GivenFeedback:
    """What a user said about a run."""

    feedback_id: str
    metric: str
    value: float | None  # None: only a comment
    comment: str | None


def delete_traces(run: TrainingRun, tracking_uri: str, round_number: int, workflow_runs: Collection[str]) -> int:
    """Delete the traces of these runs of a round, with their assessments; returns their number.

    The bytes are removed from an SQLite file and its copy, too. Raises StorageError while another process uses that
    file, and MlflowException if MLflow does not delete them.
    """
    known = _known(run, round_number)
    found = [trace.info.trace_id for name, trace in known.items() if name in workflow_runs]
    if found:
        run.client.delete_traces(run.experiment_id, trace_ids=found)
        compact(tracking_uri)
    back_up(tracking_uri)  # always: an earlier call may have been killed here
    return len(found)


def log_traces(run: TrainingRun, tracking_uri: str, transcripts: Sequence[JudgedTranscript]) -> int:
    """Log the transcripts as traces of the run; return how many MLflow has afterwards.

    A transcript is logged once, and each judge assesses it once. A failure of MLflow is logged as a warning, because
    the rows of the store are the record.
    """
    if not transcripts:
        return 0
    with _tracing_to(tracking_uri):
        from mlflow.exceptions import MlflowException

        try:
            known = _known(run, transcripts[0].calls[0].round)
            for transcript in transcripts:
                trace = known.get(transcript.calls[0].run_id)
                trace_id = _log(run, transcript) if trace is None else trace.info.trace_id
                _assess(trace_id, transcript, _assessed(trace))
            return len(_known(run, transcripts[0].calls[0].round))
        except (RegistryError, MlflowException) as error:
            LOG.warning("MLflow did not take the traces of a round (%s); monitor.traces: 0 logs none", error)
            return 0


def _known(run: TrainingRun, number: int) -> dict[str, "Trace"]:
    """The round's traces in MLflow, by the id of the workflow's run."""
    condition = f"tags.`{ROUND_TAG}` = '{number}' AND attributes.run_id = '{run.run_id}'"
    known, token = dict[str, "Trace"](), None
    while True:
        page = run.client.search_traces(
            locations=[run.experiment_id], filter_string=condition, max_results=_PAGE, page_token=token,
            include_spans=False,
        )  # fmt: skip
        known |= {trace.info.tags[RUN_TAG]: trace for trace in page if RUN_TAG in trace.info.tags}
        if not (token := page.token):
            return known


def _log(run: TrainingRun, transcript: JudgedTranscript) -> str:
    first, last = transcript.calls[0], transcript.calls[-1]
    tags = {RUN_TAG: first.run_id, ROUND_TAG: str(first.round), "rft.group": first.group_id, "rft.task": first.task_id}
    if transcript.dropped_by is not None:
        tags["rft.dropped_by"] = transcript.dropped_by
    texts = transcript.with_texts
    root = run.client.start_trace(
        first.taskset, span_type="AGENT", inputs={"messages": first.call.messages} if texts else None, tags=tags,
        experiment_id=run.experiment_id, run_id=run.run_id, start_time_ns=_ns(first.call.created_at),
    )  # fmt: skip
    for row in transcript.calls:
        call = row.call
        span = run.client.start_span(
            "model call", root.trace_id, root.span_id, span_type="CHAT_MODEL", start_time_ns=_ns(call.created_at),
            inputs={"messages": call.messages, **({"tools": call.tools} if call.tools else {})} if texts else None,
            attributes=_facts(row),
        )  # fmt: skip
        run.client.end_span(
            root.trace_id, span.span_id, outputs=call.response if texts else None,
            end_time_ns=_ns(call.created_at + call.duration_s),
        )  # fmt: skip
    end = max(row.call.created_at + row.call.duration_s for row in transcript.calls)
    outputs = (last.run_output or last.call.response) if texts else None
    run.client.end_trace(root.trace_id, outputs=outputs, end_time_ns=_ns(end))
    return str(root.trace_id)


def _facts(row: "RolloutRow") -> dict[str, Any]:
    call = row.call
    return {
        "row_id": row.row_id,
        "msg_id": call.msg_id,
        "step": row.step,
        "policy_version": call.policy_version,
        "prompt_tokens": len(call.prompt_ids),
        "completion_tokens": len(call.response_ids),
        "finish_reason": call.finish_reason,
        "temperature": call.temperature,
    }


def _assessed(trace: "Trace | None") -> set[tuple[str, str | None]]:
    """The names of the assessments that a trace has, each with its source: a judge, or a user's feedback."""
    if trace is None:
        return set()
    known = trace.info.assessments
    return {(each.name, (each.metadata or {}).get(FEEDBACK_ID) or each.source.source_id) for each in known}


def _assess(trace_id: str, transcript: JudgedTranscript, known: set[tuple[str, str | None]]) -> None:
    import mlflow
    from mlflow.entities import AssessmentSource, AssessmentSourceType

    kind = AssessmentSourceType.LLM_JUDGE if transcript.by_model else AssessmentSourceType.CODE
    source = AssessmentSource(kind, transcript.judge)
    for name, value in transcript.rewards.items():
        if (name, transcript.judge) not in known:
            mlflow.log_feedback(trace_id=trace_id, name=name, value=value, source=source)
    user = AssessmentSource(AssessmentSourceType.HUMAN, "user")
    for given in transcript.feedback:
        name, value = (given.metric, given.value) if given.value is not None else ("comment", True)
        if (name, given.feedback_id) not in known:
            mlflow.log_feedback(
                trace_id=trace_id, name=name, value=value, source=user, rationale=given.comment,
                metadata={FEEDBACK_ID: given.feedback_id},
            )  # fmt: skip


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


@contextmanager
def _tracing_to(tracking_uri: str) -> Iterator[None]:
    """Send traces to the store at ``tracking_uri``: MLflow's tracing reads the process's setting, not the client's."""
    with OPENING:
        with warnings.catch_warnings(), importing():
            warnings.simplefilter("ignore")  # of MLflow's own modules
            import mlflow
            import mlflow.pyfunc
        before = os.environ.get(_URI)
        mlflow.set_tracking_uri(tracking_uri)
        try:
            yield
        finally:
            mlflow.set_tracking_uri(before)
