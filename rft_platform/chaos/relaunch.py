"""Relaunch a failed run through the webserver, as a person does in the interface."""

import dagster as dg
import httpx

_LAUNCH = """
mutation($job: String!, $tags: [ExecutionTag!]) {
  launchPipelineExecution(executionParams: {
    selector: {repositoryLocationName: "rft_platform", repositoryName: "__repository__", pipelineName: $job}
    mode: "default", executionMetadata: {tags: $tags}
  }) { __typename }
}"""
_PARTITION_TAG = "dagster/partition"
_TIMEOUT_S = 30.0


def relaunch_last_failed(instance: dg.DagsterInstance, url: str, token: str) -> bool:
    """Launch the job and partition of the newest failed run through the webserver at ``url``; True on success."""
    records = instance.get_run_records(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE]), limit=1)
    if not records:
        return False
    run = records[0].dagster_run
    partition = run.tags.get(_PARTITION_TAG)
    tags = [{"key": _PARTITION_TAG, "value": partition}] if partition else []
    headers = {"Authorization": f"Bearer {token}"}
    body = {"query": _LAUNCH, "variables": {"job": run.job_name, "tags": tags}}
    try:
        answer = httpx.post(f"{url}/graphql", json=body, headers=headers, timeout=_TIMEOUT_S, trust_env=False).json()
        return str(answer["data"]["launchPipelineExecution"]["__typename"]) == "LaunchRunSuccess"
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False  # the webserver was killed: the next call tries again
