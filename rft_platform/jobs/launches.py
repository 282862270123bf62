"""What Dagster knows of the launches: which phases run now, and how often each has failed."""

from collections import Counter

import dagster as dg

from rft_platform.experience.rounds import round_number
from rft_platform.jobs.jobs import KIND_OF_JOB
from rft_platform.rounds.observe import Launches

_RUNNING = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
#: A cancelled run has used up its run key as a failed one has.
_FAILED = [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_PARTITION_TAG = "dagster/partition"


def launches(instance: dg.DagsterInstance) -> Launches:
    """Phases under way and the failures of each, from the run records of the plan's own jobs."""
    return Launches(
        running=frozenset(_phases(instance, _RUNNING)),
        failures=dict(Counter(_phases(instance, _FAILED))),
    )


def _phases(instance: dg.DagsterInstance, statuses: list[dg.DagsterRunStatus]) -> list[tuple[str, int]]:
    runs = instance.get_runs(dg.RunsFilter(statuses=statuses))
    return [
        (KIND_OF_JOB[run.job_name], round_number(run.tags[_PARTITION_TAG]) if _PARTITION_TAG in run.tags else 0)
        for run in runs
        if run.job_name in KIND_OF_JOB
    ]
