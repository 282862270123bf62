"""The in-process driver: asks the plan what is next and runs those jobs here, against the persistent instance.

The daemon and its sensors do the same from outside; both leave the same runs, assets and lineage behind.
"""

import time
import uuid
from collections import Counter
from dataclasses import dataclass, field

import dagster as dg

from rft_platform.assets.common import rft_rounds
from rft_platform.errors import RftError
from rft_platform.experience.rounds import round_key
from rft_platform.jobs.instance import end_orphaned_runs, open_instance
from rft_platform.jobs.jobs import JOB_OF_KIND
from rft_platform.jobs.tags import driver_tags, run_tags
from rft_platform.processes.lease import locked
from rft_platform.rounds.observe import Launches, observe
from rft_platform.rounds.plan import plan_next
from rft_platform.rounds.project import Project
from rft_platform.rounds.state import Action

#: Events go to the instance; the caller's terminal belongs to progress.
_QUIET = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}


@dataclass(slots=True)
class Launched:
    """One job that the driver ran: wall and processor seconds of the driver's own process."""

    kind: str
    round: int
    run_id: str
    wall_s: float
    cpu_s: float
    error: RftError | None = None


@dataclass(slots=True)
class DriveResult:
    """What a drive did and why it ended."""

    launched: list[Launched] = field(default_factory=list)
    finished: bool = False
    failed: str | None = None
    error: RftError | None = None  # of the last failed launch


def drive(project: Project, definitions: dg.Definitions, max_launches: int | None = None) -> DriveResult:
    """Launch what the plan says until nothing is left to do, a phase has failed too often, or a limit is reached."""
    result, failures = DriveResult(), Counter[tuple[str, int]]()
    with locked(project.home.leases / "driver.lock"), open_instance(project.home, capture_output=False) as instance:
        end_orphaned_runs(instance)
        while max_launches is None or len(result.launched) < max_launches:
            plan = plan_next(observe(project, Launches(failures=dict(failures))))
            if plan.finished or plan.failed or not plan.actions:
                result.finished, result.failed = plan.finished, plan.failed
                break
            launched = _launch(instance, definitions, plan.actions[0])
            result.launched.append(launched)
            if launched.error is not None:
                failures[launched.kind, launched.round] += 1
                result.error = launched.error
                if not launched.error.retryable:
                    result.failed = str(launched.error)
                    break
    return result


def _launch(instance: dg.DagsterInstance, definitions: dg.Definitions, action: Action) -> Launched:
    wall, cpu = time.perf_counter(), time.process_time()
    run_id, error = str(uuid.uuid4()), None
    key = round_key(action.round) if action.round else None
    if key:
        instance.add_dynamic_partitions(str(rft_rounds.name), [key])
    try:
        definitions.resolve_job_def(JOB_OF_KIND[action.kind]).execute_in_process(
            instance=instance,
            partition_key=key,
            run_id=run_id,
            tags={**run_tags(action.round), **driver_tags()},
            run_config=_QUIET,
        )
    except RftError as raised:
        error = raised
    except dg.DagsterError as raised:  # a blocking check, say
        error = RftError(str(raised).strip())
    return Launched(action.kind, action.round, run_id, time.perf_counter() - wall, time.process_time() - cpu, error)
