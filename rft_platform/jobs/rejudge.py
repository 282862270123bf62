"""Judge rounds again from a command: one run of ``judge_job`` per round, in order, like a backfill in Dagster."""

import uuid
from collections.abc import Sequence
from typing import Any

import dagster as dg

from rft_platform.common.errors import UserError
from rft_platform.experience.file_names import round_key
from rft_platform.jobs.dagster_internals.run_launcher import driver_tags
from rft_platform.jobs.driver_lock import driver_lock
from rft_platform.jobs.instance import open_instance
from rft_platform.jobs.jobs import run_tags
from rft_platform.jobs.run_error import run_error
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, all_figures, read

REJUDGE_TAG = "rft/rejudge"  #: tag of the runs; its value is the same for all runs of one command


def rejudge(
    project: Project, definitions: dg.Definitions, rounds: Sequence[int], judge: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run ``judge_job`` for each round with the asset configuration ``judge``; returns each round's figures.

    Raises UserError for rounds without rollouts, before anything is judged. Raises the error of the first round that
    fails; the judgements of earlier rounds are kept.
    """
    absent = [number for number in rounds if not project.store.count_rollouts(number)]
    if absent:
        raise UserError(f"no rollouts to judge in {_ranges(absent)}; see `rft rounds`")
    reports, together = [], uuid.uuid4().hex[:8]
    config = {
        "loggers": {"console": {"config": {"log_level": "CRITICAL"}}},  # the caller reports an error in one line
        "ops": {"judged_experiences": {"config": judge}},
    }
    with driver_lock(project.home), open_instance(project.home, capture_output=False) as instance:
        instance.add_dynamic_partitions(str(PLAIN_NAMES.rounds.name), [round_key(number) for number in rounds])
        for number in rounds:
            run_id = str(uuid.uuid4())
            try:
                definitions.resolve_job_def("judge_job").execute_in_process(
                    instance=instance,
                    partition_key=round_key(number),
                    run_id=run_id,
                    tags={**run_tags(number), **driver_tags(run_id), REJUDGE_TAG: together},
                    run_config=config,
                )
            except Exception as raised:
                raise run_error(raised) from raised
            figures = all_figures(read(project.store, number).judged or Judged())
            reports.append({"round": number, "run_id": run_id, **figures})
    return reports


def _ranges(numbers: Sequence[int]) -> str:
    """Rounds in ascending order as text; consecutive rounds are written as ``r0008 to r0099``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(" to ".join(map(round_key, dict.fromkeys((run[0], run[-1])))) for run in runs)
