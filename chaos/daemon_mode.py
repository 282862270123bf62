"""Run a project with daemon, webserver and MLflow server, and restart each of them when it ends."""

import time
from contextlib import ExitStack
from dataclasses import replace

import dagster as dg
import httpx
import psutil

from chaos.driver_mode import environment
from chaos.injector import InjectionResult, inject
from chaos.io_faults import IoFaults
from chaos.records import Ended
from chaos.schedule import Kill, Mode
from chaos.scratch import Scratch
from rft_platform.cluster.interface import Service
from rft_platform.cluster.local.supervisor import Supervisor, serving
from rft_platform.jobs.instance import open_instance
from rft_platform.jobs.launches import launches
from rft_platform.rounds.planning.plan import Plan, plan_next
from rft_platform.rounds.planning.project_state import observe
from rft_platform.rounds.project.project import Project
from rft_platform.servers.ui_servers import start_sensors, ui_servers
from rft_platform.web_guard.token import access_token
from tests.support.ports import free_port

_TICK_S = "1"  # polling interval of the sensors
_PLAN_S = 1.0  # interval at which the plan is computed
_TURN_S = 10.0  # interval at which other file system faults are put in force
_DAEMON_TURN_S = 30.0  # the same while the restarted daemon has not made the call that a fault strikes
_NAMES = {"webserver": "dagster"}  # services that have another name than their role
_LAUNCH = """
mutation($job: String!, $tags: [ExecutionTag!]) {
  launchPipelineExecution(executionParams: {
    selector: {repositoryLocationName: "rft_platform", repositoryName: "__repository__", pipelineName: $job}
    mode: "default", executionMetadata: {tags: $tags}
  }) { __typename }
}"""
_PARTITION_TAG = "dagster/partition"
_RECONCILER = "next_round_sensor"
_LOOKED, _TICKS = {"SKIPPED", "SUCCESS"}, 10
_TIMEOUT_S = 30.0


class DaemonMode:
    """The servers of `rft ui`, with an MLflow server. Implements ``supervisor.ProjectRunner``."""

    mode: Mode = "daemon"

    def __init__(self, scratch: Scratch, name: str = "daemon", faults: IoFaults | None = None) -> None:
        self._faults, self._turned_at = faults, time.monotonic()
        self.home = scratch.home(name)
        self.ended: list[Ended] = []
        self.expected: set[int] = set()
        self._scratch = scratch
        self._began = time.monotonic()
        self._stack = ExitStack()
        self._servers: dict[str, Service] = {}
        self._supervisor: Supervisor | None = None
        self._plan, self._planned_at, self._finished = Plan(), 0.0, False

    def start(self, rounds: int) -> None:
        """Write the configuration with the budget; on the first call also start the servers."""
        self._scratch.put_in_force(self.home, rounds)
        self._plan, self._planned_at, self._finished = Plan(), time.monotonic(), False
        if self._supervisor is None:
            self._instance = self._stack.enter_context(open_instance(self.home))
            self._servers = self._declared()
            self._supervisor = self._stack.enter_context(serving(self.home.own_servers, [*self._servers.values()]))
            start_sensors(self._url, access_token(self.home.web_token))

    def maintain(self) -> None:
        """Note servers that ended by themselves, and relaunch a failed run if the plan has stopped."""
        while self._supervisor is not None and not self._supervisor.ends.empty():
            end = self._supervisor.ends.get()
            if end.pid not in self.expected:
                self._note(end.name, end.exit_code, f"by itself: {end.message}")
        if self._faults is not None:
            self._turn(self._faults)
        if time.monotonic() - self._planned_at > _PLAN_S:
            project, known = Project.open(self.home), launches(self._instance)
            self._plan, self._planned_at = plan_next(observe(project, known)), time.monotonic()
            self._finished = self._plan.finished and not known.running and _ends_were_seen(self._instance)
            if self._plan.failed and self._relaunch():
                self._note("plan", 1, self._plan.failed)

    def _turn(self, faults: IoFaults) -> None:
        """Put the next faults in force if it is time, and end the daemon if one of them is for it: see ``maintain``."""
        turn_s = _DAEMON_TURN_S if faults.awaits("daemon") else _TURN_S
        if time.monotonic() - self._turned_at <= turn_s:
            return
        faults.turn_file()
        self._turned_at = time.monotonic()
        daemon = self.home.own_servers.find("daemon")
        if daemon is not None and faults.awaits("daemon"):
            self.expected.add(pid := daemon.details["pid"])
            psutil.Process(pid).terminate()

    def finished(self) -> bool:
        """Whether all rounds are done and their runs have ended, and the sensors have reported what killed runs did."""
        return self._finished

    def serves(self, role: str) -> bool:
        """Whether the role's server answers again. Other roles recover when the project makes progress."""
        service = self._servers.get(_NAMES.get(role, role))
        return service is None or service.is_ready is None or service.is_ready()

    def io_faults(self) -> IoFaults | None:
        """The file system faults; processes that start take up those that are in force."""
        return self._faults

    def inject(self, kill: Kill, timeout_s: float) -> InjectionResult:
        """Kill a process of the target's role."""
        return inject(self.home, kill, timeout_s, self.expected)

    def facts(self) -> dict[str, float]:
        """No measurements of its own."""
        return {}

    def stop(self) -> None:
        """End the servers and their remaining processes."""
        self._stack.close()

    def _declared(self) -> dict[str, Service]:
        """The servers by name, with the environment of a campaign."""
        port, mlflow_port = free_port(), free_port()
        self._url = f"http://127.0.0.1:{port}"
        tracking = f"http://127.0.0.1:{mlflow_port}"
        own = environment(
            self.home.root,
            RFT_SENSOR_INTERVAL_S=_TICK_S,
            MLFLOW_TRACKING_URI=tracking,
            MLFLOW_TRACKING_TOKEN=access_token(self.home.web_token),
            **({} if self._faults is None else self._faults.environment_with_file()),
        )
        declared = [server.service for server in ui_servers(self.home, port, mlflow_port, daemon=True)]
        return {service.name: replace(service, env={**service.env, **own}) for service in declared if service}

    def _relaunch(self) -> bool:
        return _relaunch_last_failed(self._instance, self._url, access_token(self.home.web_token))

    def _note(self, role: str, code: int | None, message: str) -> None:
        self.ended.append(Ended(role, code or 0, message, round(time.monotonic() - self._began, 2)))


def _ends_were_seen(instance: dg.DagsterInstance) -> bool:
    """Whether the sensor that reconciles Dagster with the disk has looked since the last run ended.

    A round is done with its last note. Its run ends later, and if it was killed in between the sensor reports for it.
    """
    ended = max((record.end_time or 0.0 for record in instance.get_run_records()), default=0.0)
    return any(
        tick.status.value in _LOOKED
        for state in instance.all_instigator_state()
        if state.instigator_name == _RECONCILER
        for tick in instance.get_ticks(state.instigator_origin_id, state.selector_id, after=ended, limit=_TICKS)
    )


def _relaunch_last_failed(instance: dg.DagsterInstance, url: str, token: str) -> bool:
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
