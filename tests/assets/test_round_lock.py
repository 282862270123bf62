"""One run at a time works on a round; what a cut-short run left running is given up."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from rft_platform.assets import round_lock
from rft_platform.assets.round_lock import RoundBusyError, cancel_work_of, exclusive_round, hold_round
from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.resources.project import EngineResource, ProjectResource, TrainerResource

_HOLD = """
import sys, time
from pathlib import Path
from rft_platform.assets.round_lock import hold_round
from rft_platform.config.home import Home
hold_round(Home(Path(sys.argv[1])), "r0001", "run-a")
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Iterator[Home]:
    """A home whose rounds this process holds until the test ends."""
    held: dict[Path, Any] = {}
    monkeypatch.setattr(round_lock, "_round_locks", held)
    yield Home(tmp_path)
    for each in held.values():
        each.stream.close()


@pytest.fixture
def other(home):
    """A process of another run that works on round 1."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(home.root)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_with_the_id_of_the_run_that_holds_the_round(home, other):
    with pytest.raises(RoundBusyError, match=rf"r0001 is in use by run run-a \(process {other.pid}\)"):
        hold_round(home, "r0001", "run-b", wait_s=0.3)
    assert hold_round(home, "r0002", "run-b", wait_s=0.3) is None


def test_a_second_process_of_the_same_run_is_refused(home, other):
    with pytest.raises(RoundBusyError):
        hold_round(home, "r0001", "run-a", wait_s=0.3)


def test_the_next_run_takes_over_the_round_of_a_killed_run_and_reports_it(home, other):
    other.kill()
    other.wait()
    assert hold_round(home, "r0001", "run-b") == "run-a"
    assert hold_round(home, "r0001", "run-b") is None, "its later steps hold it already"


def test_a_process_works_on_one_run_after_another(home):
    assert hold_round(home, "r0001", "run-a") is None
    assert hold_round(home, "r0001", "run-b") == "run-a"


def test_only_a_run_with_an_equal_configuration_did_the_same_work():
    def run(judge: str) -> dg.DagsterRun:
        config = {"ops": {"judged_experiences": {"config": {"judge": judge}}}}
        return instance.add_run(dg.DagsterRun(job_name="judge_job", run_config=config))

    with dg.DagsterInstance.ephemeral() as instance:
        first, queued, twin = run("exact"), run("contains"), run("exact")
        succeeded = dg.DagsterEvent(event_type_value=dg.DagsterEventType.RUN_SUCCESS.value, job_name="judge_job")
        later = datetime.now(UTC) + timedelta(minutes=1)
        instance.run_storage.handle_run_event(first.run_id, succeeded, update_timestamp=later)
        round_lock._refuse_twin(SimpleNamespace(instance=instance, run=queued), "r0001", first.run_id)
        with pytest.raises(UserError, match=f"run {first.run_id} of the same job did this"):
            round_lock._refuse_twin(SimpleNamespace(instance=instance, run=twin), "r0001", first.run_id)


def test_an_interrupted_body_gives_its_work_up_and_stays_interrupted(home, monkeypatch):
    given_up = []
    monkeypatch.setattr(round_lock, "cancel_work", lambda project, resources: given_up.append(list(resources)))

    def run_that_raises(error: BaseException) -> None:
        @dg.asset(name="rollout_batches")
        def body(context: dg.AssetExecutionContext, project: ProjectResource) -> None:
            with exclusive_round(context, "rollout_batches", [project]):
                raise error

        dg.materialize([body], resources={"project": ProjectResource(home=str(home.root))})

    with pytest.raises(ValueError, match="its own"):
        run_that_raises(ValueError("its own"))
    assert not given_up
    with pytest.raises(dg.DagsterExecutionInterruptedError):
        run_that_raises(dg.DagsterExecutionInterruptedError())
    assert [[type(resource) for resource in each] for each in given_up] == [[ProjectResource]]


def test_the_work_of_another_thread_is_cancelled_only_while_its_body_runs(home, monkeypatch):
    given_up, begun, end = [], threading.Event(), threading.Event()
    monkeypatch.setattr(round_lock, "cancel_work", lambda project, resources: given_up.append(project.home))

    @dg.asset(name="rollout_batches")
    def body(context: dg.AssetExecutionContext, project: ProjectResource) -> None:
        with exclusive_round(context, "rollout_batches", [project]):
            begun.set()
            assert end.wait(60)

    resources = {"project": ProjectResource(home=str(home.root))}
    thread = threading.Thread(target=lambda: dg.materialize([body], resources=resources))
    cancel_work_of(thread)
    thread.start()
    assert begun.wait(60)
    assert not given_up, "before its body a thread uses neither engine nor trainer"
    cancel_work_of(threading.current_thread())
    assert not given_up
    cancel_work_of(thread)
    assert given_up == [str(home.root)]
    end.set()
    thread.join(60)
    cancel_work_of(thread)
    assert given_up == [str(home.root)]


def test_the_training_is_cancelled_before_the_requests_of_the_engine(home, monkeypatch):
    order = []
    client = SimpleNamespace(cancel=lambda: order.append("training"))
    engine = SimpleNamespace(
        status=lambda: SimpleNamespace(paused=False), pause=lambda mode: order.append(mode), resume=lambda: None
    )
    monkeypatch.setattr(ProjectResource, "open", lambda self: None)
    monkeypatch.setattr(TrainerResource, "connect", lambda self, opened: client)
    monkeypatch.setattr(EngineResource, "connect", lambda self, opened: engine)
    cluster = SimpleNamespace(running=lambda pattern: [] if pattern.startswith("policy") else [pattern])
    monkeypatch.setattr(Home, "cluster", property(lambda self: cluster))
    project = ProjectResource(home=str(home.root))
    round_lock.cancel_work(project, [EngineResource(project=project), TrainerResource(project=project)])
    assert order == ["training", "abort"]
