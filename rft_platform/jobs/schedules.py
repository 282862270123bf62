"""The nightly evaluation: evaluate the newest policy again on the held-out tasks."""

import dagster as dg

from rft_platform.errors import UserError
from rft_platform.experience.rounds import round_key
from rft_platform.jobs.jobs import evaluate_job
from rft_platform.jobs.tags import run_tags
from rft_platform.resources.project import ProjectResource
from rft_platform.rounds.policy import published


@dg.schedule(
    job=evaluate_job,
    cron_schedule="0 3 * * *",
    description="Every night, evaluates the policy of the newest synced round on the held-out tasks.",
)
def nightly_evaluation(
    context: dg.ScheduleEvaluationContext, project: ProjectResource
) -> dg.RunRequest | dg.SkipReason:
    try:
        opened = project.open()
    except UserError as nothing_to_do:
        return dg.SkipReason(str(nothing_to_do))
    synced = [number for number in opened.store.rounds() if number and published(opened.store, number) is not None]
    if not synced:
        return dg.SkipReason("no round has published a policy yet")
    newest = max(synced)
    return dg.RunRequest(
        partition_key=round_key(newest),
        tags=run_tags(newest),
        run_config={"ops": {"evaluation_report": {"config": {"force": True}}}},
    )
