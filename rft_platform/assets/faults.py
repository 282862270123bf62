"""Ends a Dagster run after a fault: one line with the cause, metadata, searchable tags, and no useless retry.

Every launcher of the run (the daemon, the in-process driver, a person) reads the same tags.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import dagster as dg

from rft_platform.assets.alone import works_alone
from rft_platform.assets.phases import asset_phase
from rft_platform.errors import CheckFailedError, RftError
from rft_platform.faults import as_fault, cause_line

FAULT_TAG = "rft/fault"
RETRYABLE_TAG = "rft/retryable"
CAUSE_TAG = "rft/cause"
FAULT_TAGS = frozenset({FAULT_TAG, RETRYABLE_TAG, CAUSE_TAG})
#: Id of the run that the tags describe; a re-executed run inherits the tags of the failed one.
FAULT_OF_TAG = "rft/fault_of"


def reports_faults(body: Callable[..., dg.MaterializeResult[Any]]) -> Callable[..., dg.MaterializeResult[Any]]:
    """Decorate an asset body whose first parameter is its context: errors end the run according to the taxonomy."""

    @wraps(body)
    def asset_body(context: dg.AssetExecutionContext, *args: Any, **kwargs: Any) -> dg.MaterializeResult[Any]:
        try:
            resources = [*args, *kwargs.values()]
            with asset_phase(context, body.__name__, resources), works_alone(context, body.__name__, resources):
                result = body(context, *args, **kwargs)
        except dg.Failure:
            raise
        except Exception as raised:
            error = as_fault(raised)
            _tag(context, fault_tags(error, context.run.run_id))
            raise failure(error) from error
        refused = refusing_checks(result)
        if refused:
            _tag(context, fault_tags(check_failure(refused), context.run.run_id))
        return result

    return asset_body


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
    """The error of a run whose rows are refused by blocking checks; Dagster ends the run after its asset."""
    return CheckFailedError(f"blocking check {', '.join(names)} failed: the rows are kept, but no training reads them")


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
