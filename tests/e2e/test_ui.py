"""The interface for real: webserver, daemon and MLflow as `rft ui` starts them; a round launched as a person would."""

import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from rft_platform.processes.spawn import free_port

pytestmark = pytest.mark.slow

LAUNCH = """
mutation($job: String!, $tags: [ExecutionTag!]) {
  launchPipelineExecution(executionParams: {
    selector: {repositoryLocationName: "rft_platform", repositoryName: "__repository__", pipelineName: $job}
    mode: "default", executionMetadata: {tags: $tags}
  }) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
    ... on RunConfigValidationInvalid { errors { message } }
  }
}"""
ADD_PARTITION = """
mutation($key: String!) {
  addDynamicPartition(
    repositorySelector: {repositoryLocationName: "rft_platform", repositoryName: "__repository__"}
    partitionsDefName: "rft_round", partitionKey: $key
  ) { __typename ... on PythonError { message } }
}"""
STATUS = """query($run: ID!) { runOrError(runId: $run) { __typename ... on Run { status } } }"""


class Ui:
    """A running interface and its GraphQL endpoint."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, query: str, **variables: Any) -> Any:
        """One GraphQL request."""
        answer = httpx.post(f"{self.url}/graphql", json={"query": query, "variables": variables}, timeout=60).json()
        assert "errors" not in answer, answer
        return answer["data"]

    def run_to_success(self, job: str, partition: str | None = None) -> None:
        """Launch a job from the launchpad and wait until its run has succeeded."""
        tags = [{"key": "dagster/partition", "value": partition}] if partition else []
        launched = self.ask(LAUNCH, job=job, tags=tags)["launchPipelineExecution"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        run = launched["run"]["runId"]
        deadline = time.monotonic() + 180
        while (status := self.ask(STATUS, run=run)["runOrError"]["status"]) != "SUCCESS":
            assert status not in ("FAILURE", "CANCELED"), f"{job} ended as {status}"
            assert time.monotonic() < deadline, f"{job} is still {status}"
            time.sleep(0.5)


@pytest.fixture
def ui(make_project, test_data, tiny_model) -> Iterator[tuple[Ui, Any]]:
    """The interface of a project on GSM8K rows that nothing has run in yet."""
    tasks = {"path": str(test_data / "data" / "gsm8k"), "judge": "gsm8k"}
    project = make_project(
        "ui",
        model={"model_path": str(tiny_model), "max_model_len": 2048, "max_response_tokens": 8},
        buffer={
            "batch_size": 4,
            "total_steps": 1,
            "explorer_input": {
                "taskset": {**tasks, "split": "train", "limit": 32},
                "eval_tasksets": [{**tasks, "split": "test", "limit": 4}],
            },
        },
    )
    project.home.mkdir(parents=True)
    (project.home / "rft.yaml").write_text(project.config.read_text())
    port, mlflow_port = free_port(), free_port()
    process = subprocess.Popen(
        project.command("ui", "--port", str(port), "--mlflow-port", str(mlflow_port)),
        env=project.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if "Ctrl-C" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    assert children, "the servers are up"
    yield Ui(f"http://127.0.0.1:{port}"), project
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    _, left = psutil.wait_procs(children, timeout=5)
    assert not left, f"left behind: {left}"


def test_a_round_on_gsm8k_from_the_launchpad(ui):
    interface, project = ui
    interface.run_to_success("warm_start_job")
    assert (
        interface.ask(ADD_PARTITION, key="r0001")["addDynamicPartition"]["__typename"] == "AddDynamicPartitionSuccess"
    )
    interface.run_to_success("explore_job", "r0001")
    interface.run_to_success("sync_round_job", "r0001")
    assert project.note(1, "explore")["rows"] == 16
    assert project.note(1, "train")["steps"] == 0
    assert project.note(1, "evaluation")["results"]
