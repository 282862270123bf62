"""Metrics: what the store, Dagster and the processes say at the time of the scrape, and how long that takes."""

import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dagster as dg
import httpx
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from rft_platform.cluster.local.leases import LEASE_VARIABLE, read_lease, write_lease
from rft_platform.common.files import write_text
from rft_platform.definitions import defs
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import PolicyEngine
from rft_platform.inference.serving.http_server import ServerThread
from rft_platform.jobs.instance import open_instance
from rft_platform.online.traffic.database import FIRST_IMPORTED
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Explored, Judged, Policy, RoundEvaluation, publish, write
from rft_platform.servers.metrics import prometheus_collector
from rft_platform.servers.metrics.catalogue import CATALOGUE, Sample
from rft_platform.servers.metrics.prometheus_collector import PlatformCollector
from rft_platform.servers.metrics.server import metrics_app
from tests.experience.samples import judged, rollouts
from tests.support.records import result, trained

Values = dict[tuple[str, ...], float]


def scrape(project: Project) -> dict[str, Values]:
    """Every sample of one scrape, by name and label values."""
    found: dict[str, Values] = {}
    for family in PlatformCollector(project.home).collect():
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def publish_round(project: Project, number: int, **scores: float) -> None:
    """Leave the notes that a synced round (0: the warm start) leaves."""
    publish(project.store, Policy(folder="f", policy_version=2 * number, weights_digest="d", round=number))
    results = [result()] if scores else []
    write(project.store, number, Judged(sound=True, mean_reward=number / 10, seconds=0.5))
    metrics = {**scores, "deploy_s": 0.25, "evaluation_s": 2.0}
    write(project.store, number, Explored(seconds=4.0))
    write(project.store, number, trained(seconds={"step": 3.0}))
    write(project.store, number, RoundEvaluation(results=results, metrics=metrics))


def test_metrics_of_a_project_that_has_not_started(project: Project) -> None:
    found = scrape(project)
    assert found["rft_rounds_budget"][()] == 1000
    assert found["rft_rounds_done"][()] == 0
    assert found["rft_rows"] == {("rollouts",): 0, ("judged",): 0}
    assert found["rft_plan_state"] == {
        ("launching",): 1, ("running",): 0, ("waiting",): 0, ("finished",): 0, ("failed",): 0
    }  # fmt: skip
    assert not any(found["rft_scrape_failed"].values())
    assert "rft_engine_up" not in found


def test_a_quiet_online_project_waits(project: Project) -> None:
    publish_round(project, 0)
    (offline,) = scrape(project)["rft_project_info"]
    config = yaml.safe_load(project.home.config_file.read_text())
    config["buffer"] = {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}}
    write_text(project.home.config_file, yaml.safe_dump(config))
    found = scrape(project)
    (online,) = found["rft_project_info"]
    column = CATALOGUE["rft_project_info"].labels.index("online")
    assert (offline[column], online[column]) == ("false", "true")
    assert found["rft_plan_state"][("waiting",)] == 1


def test_rounds_rows_policies_and_scores_are_those_of_the_store(project: Project) -> None:
    for number in range(3):
        publish_round(project, number, **({"sampled_pass": 0.5, "greedy_pass": 0.75} if number == 1 else {}))
    rows = rollouts(2, 2, round=1)
    project.store.write_rollouts(1, 0, rows)
    project.store.write_judged(1, "exact@1", judged(rows))
    project.store.write_rollouts(3, 0, rollouts(1, 2, round=3))
    found = scrape(project)
    assert found["rft_rounds_done"][()] == 2
    assert found["rft_frontier_round"] == {("explore",): 3, ("sync",): 3}
    assert found["rft_rows"] == {("rollouts",): 6, ("judged",): 4}
    assert found["rft_frontier_rows"] == {("rollouts",): 2, ("judged",): 0}
    assert found["rft_policy_version_trained"][()] == 4
    assert found["rft_evaluation_round"][()] == 1
    assert found["rft_evaluation_score"] == {("sampled_pass",): 0.5, ("greedy_pass",): 0.75}
    assert found["rft_reward_mean"][()] == 0.2
    expected = {("rollout",): 4.0, ("judge",): 0.5, ("train",): 3.25, ("evaluation",): 2.0}
    assert found["rft_round_seconds"] == expected
    assert 0 <= found["rft_last_progress_age_seconds"][()] < 60


def test_rows_are_counted_again_where_a_round_has_changed(project: Project) -> None:
    collector = PlatformCollector(project.home)

    def rows() -> float:
        samples = (s for family in collector.collect() for s in family.samples if s.name == "rft_rows")
        return next(sample.value for sample in samples if sample.labels["stage"] == "rollouts")

    for batch in range(3):
        project.store.write_rollouts(1, batch, rollouts(1, 1, round=1, batch=batch))
        assert rows() == batch + 1


@pytest.mark.slow
def test_runs_are_counted_by_job_and_fault_and_running_phases_are_seen(project: Project) -> None:
    publish_round(project, 0)
    explore, sync = (defs.resolve_job_def(name) for name in ("explore_job", "sync_round_job"))
    with open_instance(project.home) as instance:
        for fault in ("engine", "engine", "storage"):
            tags = {"rft/fault": fault, "dagster/partition": "r0001"}
            instance.create_run_for_job(explore, tags=tags, status=dg.DagsterRunStatus.FAILURE)
        instance.create_run_for_job(sync, status=dg.DagsterRunStatus.FAILURE)
        tags = {"dagster/partition": "r0001"}
        instance.create_run_for_job(explore, tags=tags, status=dg.DagsterRunStatus.STARTED)
    found = scrape(project)
    assert found["rft_failed_runs"] == {
        ("explore_job", "engine"): 2, ("explore_job", "storage"): 1, ("sync_round_job", "orchestration"): 1
    }  # fmt: skip
    assert found["rft_phase_running"] == {("warm_start",): 0, ("explore",): 1, ("sync",): 0}
    assert found["rft_phase_failures"][("explore",)] == 3
    assert found["rft_plan_state"][("running",)] == 1


@pytest.fixture
def leases_of_engine(project: Project, policy_engine: PolicyEngine) -> Iterator[None]:
    """The home's leases: one of an engine that serves, one of an engine and one of a trainer that have ended."""
    assert isinstance(policy_engine, EngineClient)
    folder = Path(psutil.Process(policy_engine.address.details["pid"]).environ()[LEASE_VARIABLE]).parent
    project.home.root.mkdir(parents=True, exist_ok=True)
    project.home.leases.symlink_to(folder)
    lease = read_lease(folder / "engine.json")
    assert lease is not None
    gone = [project.home.leases / "engine-1.json", project.home.leases / "trainer.json"]
    for path in gone:
        write_lease(path, replace(lease, kind=path.stem, pid=2**22 + 1))
    yield
    for path in gone:
        path.unlink()


def test_engine_and_trainer_are_probed_through_their_leases(
    project: Project, policy_engine: PolicyEngine, leases_of_engine: None
) -> None:
    publish_round(project, 0)
    publish_round(project, 3)
    found = scrape(project)
    assert found["rft_engine_up"] == {("engine",): 1, ("engine-1",): 0}
    served = policy_engine.status().policy_version
    assert found["rft_policy_version_served"] == {("engine",): served}
    assert found["rft_policy_version_lag"] == {("engine",): 6 - served}
    assert found["rft_engine_requests_total"][("engine",)] == policy_engine.metrics()["requests"]
    assert found["rft_trainer_up"][()] == 0


def test_imported_versions_and_those_of_further_policies_have_no_lag() -> None:
    served = {"engine": 38.0, "engine-candidate": FIRST_IMPORTED + 1.0, "policy-wolf": 3.0, "policy-wolf-1": 3.0}
    samples = [Sample("rft_policy_version_served", version, (name,)) for name, version in served.items()]
    found = list(prometheus_collector._lag([Sample("rft_policy_version_trained", 40.0), *samples]))
    assert found == [Sample("rft_policy_version_lag", 2.0, ("engine",))]


def test_a_source_that_cannot_be_read_affects_no_other(project: Project) -> None:
    publish_round(project, 0)
    publish_round(project, 1)
    (project.store.round_folder(1) / "policy-policy.json").write_text("{")
    found = scrape(project)
    assert found["rft_scrape_failed"][("outcome",)] == 1
    assert found["rft_scrape_failed"][("runs",)] == 0
    assert "rft_driver_running" in found


def test_a_configuration_that_cannot_be_read_hides_no_process(project: Project) -> None:
    write_text(project.home.config_file, "buffer: [")
    found = scrape(project)
    assert found["rft_scrape_failed"][("project",)] == 1 and found["rft_driver_running"][()] == 0
    assert {source for (source,) in found["rft_scrape_failed"]} == {"project", "runs", "driver", "engine", "trainer"}
    project.home.config_file.unlink()
    assert scrape(project) == {}


@pytest.mark.slow
def test_a_replaced_home_is_read_again(project: Project) -> None:
    collector = PlatformCollector(project.home)

    def failed_sources() -> list[str]:
        samples = {f.name: f.samples for f in collector.collect()}
        return [s.labels["source"] for s in samples.get("rft_scrape_failed", []) if s.value]

    with open_instance(project.home, capture_output=False):
        assert failed_sources() == []
    configuration = project.home.config_file.read_text()
    shutil.rmtree(project.home.root)
    assert failed_sources() == []  # no project: nothing to report
    write_text(project.home.config_file, configuration)
    assert failed_sources() == []
    assert project.home.dagster.is_dir()


@pytest.fixture
def thousand_rounds(project: Project) -> Project:
    """999 rounds behind it, the last one rolled out but not judged."""
    store = project.store
    publish_round(project, 0)
    publish_round(project, 1)
    rows = rollouts(1, 1, round=1)
    store.write_rollouts(1, 0, rows)
    store.write_judged(1, "exact@1", judged(rows))
    for number in range(2, 999):
        shutil.copytree(store.round_folder(1), store.round_folder(number))
    shutil.copytree(store.round_folder(1) / "rollouts", store.round_folder(999) / "rollouts")
    return project


@pytest.fixture
def served(thousand_rounds: Project) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = ServerThread(metrics_app(thousand_rounds.home, None), listener, "metrics", 1)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.close()


@pytest.mark.slow
def test_a_scrape_of_a_thousand_rounds_is_quick(served: str) -> None:
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        assert client.get(f"{served}/healthz").text == "ok\n"
        assert client.get(f"{served}/elsewhere").status_code == 404
        assert client.get(f"{served}/metrics").is_success  # the first one counts all rows
        seconds = []
        for _ in range(5):
            started = time.process_time()  # of server and caller; a busy machine doubles it
            text = client.get(f"{served}/metrics").text
            seconds.append(time.process_time() - started)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["rft_rounds_done"].samples[0].value == 998
    assert min(seconds) < 0.2, f"{seconds}, by source: {families['rft_scrape_seconds'].samples}"


def test_every_name_is_well_formed_and_of_its_kind() -> None:
    for name, entry in CATALOGUE.items():
        assert name.startswith("rft_")
        assert name.endswith("_total") == (entry.kind == "counter"), name
