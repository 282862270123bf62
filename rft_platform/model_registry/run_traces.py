"""Write runs of a workflow to MLflow as traces: a span for each model call, and the judge's rewards as assessments."""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rft_platform.common.processes.gc_control import importing
from rft_platform.model_registry.mlflow_client import opening
from rft_platform.model_registry.tracking import TrainingRun

if TYPE_CHECKING:
    from mlflow.entities import Trace

    from rft_platform.experience.record import RolloutRow

LOG = logging.getLogger(__name__)
RUN_TAG = "rft.workflow_run"
ROUND_TAG = "rft.round"
_URI = "MLFLOW_TRACKING_URI"


@dataclass(frozen=True, slots=True)
class JudgedTranscript:
    """A run of a workflow with the rewards of a judge."""

    calls: Sequence["RolloutRow"]  # in the order of the run; at least one
    rewards: Mapping[str, float]  # the reward and its parts, by name
    judge: str  # name and version
    by_model: bool  # whether a language model judged
    dropped_by: str | None = None


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
            experiment = run.client.get_run(run.run_id).info.experiment_id
            known = _known(run, experiment, transcripts[0].calls[0].round)
            for transcript in transcripts:
                trace = known.get(transcript.calls[0].run_id)
                trace_id = _log(run, experiment, transcript) if trace is None else trace.info.trace_id
                _assess(trace_id, transcript, _assessed(trace))
            return len(_known(run, experiment, transcripts[0].calls[0].round))
        except MlflowException as error:
            LOG.warning("MLflow did not take the traces of a round (%s); monitor.traces: 0 logs none", error)
            return 0


def _known(run: TrainingRun, experiment: str, number: int) -> dict[str, "Trace"]:
    """The round's traces in MLflow, by the id of the workflow's run."""
    condition = f"tags.`{ROUND_TAG}` = '{number}' AND attributes.run_id = '{run.run_id}'"
    found = run.client.search_traces(
        locations=[experiment], filter_string=condition, max_results=500, include_spans=False
    )
    return {trace.info.tags[RUN_TAG]: trace for trace in found if RUN_TAG in trace.info.tags}


def _log(run: TrainingRun, experiment: str, transcript: JudgedTranscript) -> str:
    first, last = transcript.calls[0], transcript.calls[-1]
    tags = {RUN_TAG: first.run_id, ROUND_TAG: str(first.round), "rft.group": first.group_id, "rft.task": first.task_id}
    if transcript.dropped_by is not None:
        tags["rft.dropped_by"] = transcript.dropped_by
    root = run.client.start_trace(
        first.taskset, span_type="AGENT", inputs={"messages": first.call.messages}, tags=tags, experiment_id=experiment,
        run_id=run.run_id, start_time_ns=_ns(first.call.created_at),
    )  # fmt: skip
    for row in transcript.calls:
        call = row.call
        span = run.client.start_span(
            "model call", root.trace_id, root.span_id, span_type="CHAT_MODEL", start_time_ns=_ns(call.created_at),
            inputs={"messages": call.messages, **({"tools": call.tools} if call.tools else {})},
            attributes=_facts(row),
        )  # fmt: skip
        run.client.end_span(
            root.trace_id, span.span_id, outputs=call.response, end_time_ns=_ns(call.created_at + call.duration_s)
        )
    end = max(row.call.created_at + row.call.duration_s for row in transcript.calls)
    run.client.end_trace(root.trace_id, outputs=last.run_output or last.call.response, end_time_ns=_ns(end))
    return str(root.trace_id)


def _facts(row: "RolloutRow") -> dict[str, Any]:
    call = row.call
    return {
        "row_id": row.row_id,
        "step": row.step,
        "policy_version": call.policy_version,
        "prompt_tokens": len(call.prompt_ids),
        "completion_tokens": len(call.response_ids),
        "finish_reason": call.finish_reason,
        "temperature": call.temperature,
    }


def _assessed(trace: "Trace | None") -> set[tuple[str, str | None]]:
    """The names and sources of the assessments that a trace has."""
    return set() if trace is None else {(each.name, each.source.source_id) for each in trace.info.assessments}


def _assess(trace_id: str, transcript: JudgedTranscript, known: set[tuple[str, str | None]]) -> None:
    import mlflow
    from mlflow.entities import AssessmentSource, AssessmentSourceType

    kind = AssessmentSourceType.LLM_JUDGE if transcript.by_model else AssessmentSourceType.CODE
    source = AssessmentSource(kind, transcript.judge)
    for name, value in transcript.rewards.items():
        if (name, transcript.judge) not in known:
            mlflow.log_feedback(trace_id=trace_id, name=name, value=value, source=source)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


@contextmanager
def _tracing_to(tracking_uri: str) -> Iterator[None]:
    """Send traces to the store at ``tracking_uri``: MLflow's tracing reads the process's setting, not the client's."""
    with opening():
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
