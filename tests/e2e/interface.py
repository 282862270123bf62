"""A running ``rft ui`` and what a person does in it, through its GraphQL endpoint."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx
import psutil

from rft_platform.cluster.local.processes import wait_until_ended
from tests.support.ports import free_port

_REPOSITORY = 'repositoryLocationName: "rft_platform", repositoryName: "__repository__"'
_LAUNCH = f"""
mutation($job: String!, $tags: [ExecutionTag!], $config: RunConfigData) {{
  launchPipelineExecution(executionParams: {{
    selector: {{{_REPOSITORY}, pipelineName: $job}}
    mode: "default", runConfigData: $config, executionMetadata: {{tags: $tags}}
  }}) {{
    __typename ... on LaunchRunSuccess {{ run {{ runId }} }} ... on PythonError {{ message }}
    ... on RunConfigValidationInvalid {{ errors {{ message }} }}
  }}
}}"""
_ADD_PARTITION = f"""
mutation($key: String!) {{
  addDynamicPartition(
    repositorySelector: {{{_REPOSITORY}}}, partitionsDefName: "rft_round", partitionKey: $key
  ) {{ __typename ... on PythonError {{ message }} }}
}}"""
_SENSOR = f"""
mutation($name: String!) {{
  startSensor(sensorSelector: {{{_REPOSITORY}, sensorName: $name}}) {{ __typename ... on PythonError {{ message }} }}
}}"""
_BACKFILL = """
mutation($params: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $params) {
    __typename ... on LaunchBackfillSuccess { backfillId launchedRunIds } ... on PythonError { message }
  }
}"""
_BACKFILL_STATUS = """
query($id: String!) {
  partitionBackfillOrError(backfillId: $id) {
    __typename ... on PartitionBackfill { status runs { runId status startTime endTime tags { key value } } }
  }
}"""
_TERMINATE = """
mutation($run: String!) {
  terminateRun(runId: $run) { __typename ... on TerminateRunFailure { message } ... on PythonError { message } }
}"""
_RUN = """
query($run: ID!) {
  runOrError(runId: $run) { __typename ... on Run { status tags { key value } } }
}"""
_MATERIALISED = """
query($key: AssetKeyInput!, $partition: String!) {
  assetNodeOrError(assetKey: $key) { ... on AssetNode {
    assetMaterializations(partitions: [$partition], limit: 1) {
      metadataEntries { label ... on JsonMetadataEntry { jsonString } ... on TextMetadataEntry { text }
        ... on UrlMetadataEntry { url }
        ... on TableMetadataEntry { table { records } } }
    }
  } }
}"""

FINISHED = ("SUCCESS", "FAILURE", "CANCELED")


def _tag(run: dict[str, Any], name: str) -> str:
    return next(str(tag["value"]) for tag in run["tags"] if tag["key"] == name)


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 90.0) -> Any:
    """What ``condition`` gives once it gives something; a test failure after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never happened in {timeout:.0f} s: {what}"
        time.sleep(0.05)
    return value


def stretched(seconds: float) -> float:
    """``seconds`` of a quiet machine, as long as they take now beside the other processes of this machine."""
    began, used = time.perf_counter(), time.process_time()
    while time.process_time() - used < 0.1:
        pass
    return seconds * max(1.0, (time.perf_counter() - began) / 0.1)


@dataclass(frozen=True)
class Workplace:
    """A folder in which a user works: ``rft.yaml``, and the default home beside it."""

    cwd: Path

    @property
    def home(self) -> Path:
        return self.cwd / ".rft"

    @property
    def config(self) -> Path:
        return self.cwd / "rft.yaml"


@dataclass
class Ui:
    """A running interface: its addresses, its access token and its process."""

    url: str
    mlflow_url: str
    token: str
    process: "subprocess.Popen[str]"

    def ask(self, query: str, **variables: Any) -> Any:
        """One GraphQL request."""
        body, headers = {"query": query, "variables": variables}, {"Authorization": f"Bearer {self.token}"}
        answer = httpx.post(f"{self.url}/graphql", json=body, headers=headers, timeout=60).json()
        assert "errors" not in answer, answer
        return answer["data"]

    def add_round(self, key: str) -> None:
        """Add a partition."""
        added = self.ask(_ADD_PARTITION, key=key)["addDynamicPartition"]
        assert added["__typename"] in ("AddDynamicPartitionSuccess", "DuplicateDynamicPartitionError"), added

    def launch(self, job: str, partition: str | None = None, config: dict[str, Any] | None = None) -> str:
        """Launch a job from the launchpad; returns the run's id."""
        tags = [{"key": "dagster/partition", "value": partition}] if partition else []
        launched = self.ask(_LAUNCH, job=job, tags=tags, config=config or {})["launchPipelineExecution"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        return str(launched["run"]["runId"])

    def status(self, run: str) -> str:
        """A run's status."""
        return str(self.ask(_RUN, run=run)["runOrError"]["status"])

    def tags(self, run: str) -> dict[str, str]:
        """A run's tags."""
        return {tag["key"]: tag["value"] for tag in self.ask(_RUN, run=run)["runOrError"]["tags"]}

    def end_of(self, run: str, timeout: float = 180.0) -> str:
        """Wait until a run has ended; returns its status."""
        wait_for(lambda: self.status(run) in FINISHED, f"run {run} ends", timeout)
        return self.status(run)

    def run_to_success(self, job: str, partition: str | None = None) -> str:
        """Launch a job from the launchpad and wait until its run has succeeded."""
        run = self.launch(job, partition)
        assert (ended := self.end_of(run)) == "SUCCESS", f"{job} ended as {ended}: {self.tags(run)}"
        return run

    def terminate(self, run: str) -> None:
        """Press "Terminate"."""
        answer = self.ask(_TERMINATE, run=run)["terminateRun"]
        assert answer["__typename"] == "TerminateRunSuccess", answer

    def start_sensors(self) -> None:
        """Turn both sensors on."""
        for name in ("next_round_sensor", "experience_threshold_sensor"):
            answer = self.ask(_SENSOR, name=name)["startSensor"]
            assert answer["__typename"] == "Sensor", answer

    def backfill(self, partitions: list[str], config: dict[str, Any], job: str) -> list[str]:
        """Backfill a job over partitions and wait for it; returns the statuses of its runs.

        Its runs start one after the other, in the order of the partitions.
        """
        selector = {
            "partitionSetName": f"{job}_partition_set",
            "repositorySelector": {"repositoryLocationName": "rft_platform", "repositoryName": "__repository__"},
        }
        params = {"selector": selector, "partitionNames": partitions, "runConfigData": config}
        launched = self.ask(_BACKFILL, params=params)["launchPartitionBackfill"]
        assert launched["__typename"] == "LaunchBackfillSuccess", launched

        def ended() -> list[str] | None:
            told = self.ask(_BACKFILL_STATUS, id=launched["backfillId"])["partitionBackfillOrError"]
            runs = told["runs"]
            return runs if len(runs) == len(partitions) and all(run["status"] in FINISHED for run in runs) else None

        runs = sorted(
            wait_for(ended, "the backfill's runs end", 60 + 60 * len(partitions)), key=itemgetter("startTime")
        )
        assert [_tag(run, "dagster/partition") for run in runs] == partitions
        assert all(first["endTime"] <= second["startTime"] for first, second in pairwise(runs))
        return [run["status"] for run in runs]

    def metadata(self, asset: str, partition: str) -> dict[str, Any]:
        """Metadata of the newest materialisation, as the asset's page shows it: label -> its entry."""
        told = self.ask(_MATERIALISED, key={"path": [asset]}, partition=partition)["assetNodeOrError"]
        (newest,) = told["assetMaterializations"]
        return {entry["label"]: entry for entry in newest["metadataEntries"]}

    def child(self, word: str) -> psutil.Process:
        """The server of ``rft ui`` whose command line holds ``word``."""
        for process in psutil.Process(self.process.pid).children():
            with suppress(psutil.ZombieProcess):  # it was just killed
                if word in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"no server of rft ui has {word!r} in its command line")


@contextmanager
def running_ui(project: Any, *options: str) -> Iterator[Ui]:
    """``rft ui`` on a project, from its first word to the end of everything it started.

    A project that was not started yet gets the user's file as its configuration; its paths have to be absolute.
    """
    project.home.mkdir(parents=True, exist_ok=True)
    if not (project.home / "rft.yaml").exists():
        (project.home / "rft.yaml").write_text(project.config.read_text())
    port, mlflow_port = free_port(), free_port()
    process = subprocess.Popen(
        project.command("ui", "--port", str(port), "--mlflow-port", str(mlflow_port), *options),
        env=project.environment | {"RFT_SENSOR_INTERVAL_S": "1", "RFT_RETRY_DELAY_S": "1"},
        cwd=project.cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "Ctrl-C" in line:
            break
    assert said and "Ctrl-C" in said[-1], "".join(said)
    try:
        token = (project.home / "web_token").read_text().strip()
        assert token not in "".join(said), "a log of this output would have the token"
        yield Ui(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{mlflow_port}", token, process)
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    left = wait_until_ended(children, 5)
    assert not left, f"left behind: {left}"
