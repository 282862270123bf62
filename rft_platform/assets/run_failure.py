"""Run the body of an asset or op as a stage. A fault ends its Dagster run with the cause as message, metadata and tags.

Every launcher of the run (the daemon, the in-process driver, a person) reads the same tags, which also say whether a
retry can help.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import dagster as dg

from rft_platform.assets.common import round_of
from rft_platform.assets.round_lock import exclusive_round
from rft_platform.cluster.local.log_files import bound_logs_now_and_then
from rft_platform.cluster.this_process import is_interrupted
from rft_platform.common.errors import CheckFailedError, RftError
from rft_platform.common.fault_classification import as_fault, cause_line
from rft_platform.config.home import Home
from rft_platform.experience.file_names import is_round_key
from rft_platform.observability.logs import phase_context
from rft_platform.resources.project import ProjectResource

FAULT_TAG = "rft/fault"
RETRYABLE_TAG = "rft/retryable"
CAUSE_TAG = "rft/cause"
#: Cause of a run that ended without a recorded cause.
UNKNOWN_CAUSE = "the run ended without an error message: its process died, or it never started"
FAULT_TAGS = frozenset({FAULT_TAG, RETRYABLE_TAG, CAUSE_TAG})
#: Id of the run that the tags describe; a re-executed run inherits the tags of the failed one.
FAULT_OF_TAG = "rft/fault_of"

_Result = TypeVar("_Result", bound=dg.MaterializeResult[Any] | None)


def reports_faults(body: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorate the body of an asset or an op, whose first parameter is its context.

    An error ends the run and is reported as a fault.
    """

    @wraps(body)
    def asset_body(context: dg.AssetExecutionContext, *args: Any, **kwargs: Any) -> _Result:
        try:
            resources = [*args, *kwargs.values()]
            phase = asset_phase(context, body.__name__, resources)
            events = _lineage_events(context, body.__name__, resources)
            with phase, exclusive_round(context, body.__name__, resources), _as_interruption(), events:
                result = body(context, *args, **kwargs)
        except dg.Failure:
            raise
        except Exception as raised:
            error = as_fault(raised)
            _tag(context, fault_tags(error, context.run.run_id))
            raise failure(error) from error
        refused = None if result is None else refusing_checks(result)
        if refused:
            _tag(context, fault_tags(check_failure(refused), context.run.run_id))
        return result

    return asset_body


@contextmanager
def _as_interruption() -> Iterator[None]:
    """Treat errors as an interruption, not as a failure, if the command interrupts this thread.

    If the thread is already interrupted, the body does not start.
    """
    if is_interrupted():
        raise dg.DagsterExecutionInterruptedError
    try:
        yield
    except Exception as raised:
        if is_interrupted():
            raise dg.DagsterExecutionInterruptedError from raised
        raise


@contextmanager
def asset_phase(context: dg.AssetExecutionContext, name: str, resources: Sequence[Any]) -> Iterator[None]:
    """Run the body of asset ``name``, which has the given resources, as a stage of their project.

    Log lines get round, run and name, and the size of log files is limited.
    """
    project = ProjectResource.among(resources)
    home = Home.from_environment() if project is None else project.place
    bound_logs_now_and_then(home.logs)
    with phase_context(context.partition_key if context.has_partition_key else None, context.run.run_id, name):
        yield


@contextmanager
def _lineage_events(context: dg.AssetExecutionContext, name: str, resources: Sequence[Any]) -> Iterator[None]:
    """Emit the OpenLineage events of a round's asset, if the project's configuration says so.

    Imports of traces are partitions, too; for a partition that should be a round and is none, the body raises.
    """
    from rft_platform.rounds.reporting.lineage_events import stage_events

    project = ProjectResource.among(resources)
    if project is None or not context.has_partition_key or not is_round_key(context.partition_key):
        yield
        return
    with stage_events(project.open(), name, round_of(context), context.run.run_id, context.run.job_name):
        yield


def failure(error: RftError) -> dg.Failure:
    """Convert the error to a Dagster step failure."""
    return dg.Failure(
        description=f"{error.fault}: {cause_line(error)}",
        metadata={
            "fault": error.fault,
            "retryable": error.retryable,
            "hint": error.hint,
            "error": type(error).__name__,
            "message": dg.MetadataValue.text(str(error)),
        },
        allow_retries=error.retryable,
    )


def fault_tags(error: RftError, run_id: str) -> dict[str, str]:
    """The tags of the run ``run_id`` that ended with ``error``."""
    return {
        FAULT_TAG: error.fault,
        RETRYABLE_TAG: "true" if error.retryable else "false",
        CAUSE_TAG: cause_line(error),
        FAULT_OF_TAG: run_id,
    }


def fault_of(run: dg.DagsterRun) -> dict[str, str]:
    """The ``FAULT_TAGS`` that the run itself set, without those inherited from another run."""
    if run.tags.get(FAULT_OF_TAG, run.run_id) != run.run_id:
        return {}
    return {name: run.tags[name] for name in FAULT_TAGS if run.tags.get(name)}


def check_failure(names: list[str]) -> CheckFailedError:
    """The error of a run whose rows blocking checks refuse; Dagster ends such a run after the asset."""
    return CheckFailedError(f"blocking check {', '.join(names)} failed: the rows are kept, but no training uses them")


def refusing_checks(result: dg.MaterializeResult[Any]) -> list[str]:
    """Names of the failed checks of severity ERROR, all of which block."""
    found = result.check_results or []
    return [
        str(check.check_name) for check in found if not check.passed and check.severity is dg.AssetCheckSeverity.ERROR
    ]


def _tag(context: dg.AssetExecutionContext, tags: Mapping[str, str]) -> None:
    try:
        context.instance.add_run_tags(context.run.run_id, dict(tags))
    except Exception as error:  # the run store may be on the same full disk, and the fault itself must be reported
        context.log.warning(f"the run's tags could not be written: {error}")
