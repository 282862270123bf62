"""Real faults in real rounds: what breaks is named, what can be repeated is, and the weights are those of no fault."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from rft_platform.cluster.local.leases import read_lease
from rft_platform.cluster.local.processes import wait_until_ended
from rft_platform.common.files import digest_file, read_json, write_sealed_json
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.experience.store import ExperienceStore
from rft_platform.inference.client import EngineClient
from rft_platform.jobs.instance import open_instance
from rft_platform.run.start import write_config
from rft_platform.servers.ui_servers import answers
from tests.support.builders import flip_a_byte
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # one test may have to make up for those left out

#: Launches so many phases and says how the drive ended.
DRIVE = """
import json, sys
from rft_platform.definitions import defs
from rft_platform.run.driver import drive
from rft_platform.run.start import prints_go_to
from rft_platform.config.home import Home
from rft_platform.rounds.project.project import Project
project = Project.open(Home.from_environment())
with prints_go_to(project.home.logs / "driver.log"):
    done = drive(project, defs, max_launches=int(sys.argv[1]))
errors = [None if each.error is None else type(each.error).__name__ for each in done.launched]
print(json.dumps({"launched": [f"{each.kind}:{each.round}" for each in done.launched], "errors": errors,
                  "finished": done.finished, "failed": done.failed}))
"""


class Faulty:
    """A project whose own code can do harm, and whose engine and trainer go on between commands."""

    def __init__(self, project: Any, checkpoints: Path) -> None:
        self.project, self.home, self.checkpoints = project, project.home, checkpoints
        self.fuses = project.config.parent / "fuses"
        self.fuses.mkdir()
        self.environment = {
            **project.environment, "RFT_TEST_FUSES": str(self.fuses), "RFT_RETRY_DELAY_S": "0.2",
        }  # fmt: skip

    def fuse(self, name: str) -> None:
        (self.fuses / name).touch()

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        """``rft run`` to its end."""
        command = self.project.command("run", "--config", str(self.project.config), "--detach-engines", *options)
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=240, check=False)

    def drive(self, launches: int) -> dict[str, Any]:
        """At most so many launches of the plan."""
        done = subprocess.run(
            [sys.executable, "-c", DRIVE, str(launches)],
            env=self.environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def reach(self, number: int) -> None:
        """Bring the project to the end of a round, where an earlier test has not done so."""
        while not (self.home / "rounds" / f"r{number:04d}" / "evaluation.json").exists():
            assert self.drive(1)["errors"] == [None]

    def kill(self, kind: str) -> None:
        lease = read_lease(self.home / "leases" / f"{kind}.json")
        assert lease is not None
        process = psutil.Process(lease.pid)
        process.kill()
        assert wait_until_ended([process], 10) == []

    def runs(self) -> list[tuple[str, str, str | None]]:
        """(job, status, fault) of every run, oldest first."""
        with open_instance(Home(self.home)) as instance:
            return [
                (run.job_name, run.status.value, run.tags.get("rft/fault")) for run in reversed(instance.get_runs())
            ]

    def rows(self, number: int) -> pa.Table:
        return ExperienceStore(self.home / "rounds").read_rollouts(number)

    def engine(self) -> EngineClient:
        cluster = Home(self.home).cluster
        address = cluster.find("engine")
        assert address is not None
        return EngineClient(address, cluster)


def wait_until(condition: Any, what: str, timeout: float = 120, poll_s: float = 0.005) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(poll_s)


class SmallDisk:
    """A separate file system, whose size can be set; an ordinary folder where this user may not mount one."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.mounted = folder, False
        self.mounted = self.resize(256)

    def resize(self, mib: int) -> bool:
        options = f"remount,size={mib}m" if self.mounted else f"size={mib}m"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    @property
    def used_mib(self) -> int:
        return shutil.disk_usage(self.folder).used // 2**20 + 1


class MlflowServer:
    """A real MLflow server on its own port, which can be killed and started again."""

    def __init__(self, folder: Path, fuses: Path) -> None:
        self.port, self._folder, self._pid_file = free_port(), folder, fuses / "mlflow.pid"
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store, artifacts = f"sqlite:///{self._folder}/mlflow.db", str(self._folder / "artifacts")
        options = ["--backend-store-uri", store, "--default-artifact-root", artifacts, "--workers", "1"]
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self._folder / "mlflow.log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *options, "--host", "127.0.0.1", "--port", str(self.port)],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_until(answers(f"{self.url}/health"), "MLflow answers", poll_s=0.1)
        self._pid_file.write_text(str(self._process.pid))

    def end(self) -> None:
        """End it with its workers, also where only those are left."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    made = SmallDisk(tmp_path_factory.mktemp("small") / "disk")
    yield made
    if made.mounted:
        subprocess.run(["umount", "-l", str(made.folder)], check=True)


@pytest.fixture(scope="module")
def faulty(make_project, disk: SmallDisk) -> Faulty:
    """Four rounds after a short warm start; checkpoints on a small disk."""
    project = make_project("faulty")
    config = yaml.safe_load(project.config.read_text())
    tasks = config["buffer"]["explorer_input"]["taskset"]
    tasks |= {"workflow": "faulty_code:answer", "judge": "faulty_code:digit_share"}
    config["buffer"]["total_steps"] = 4
    config["warm_start"] = {"path": tasks["path"], "batch_size": 8, "steps": 20, "eval_every": 10}
    config["checkpoint_root_dir"] = str(disk.folder)
    project.config.write_text(yaml.safe_dump(config))
    write_config(Home(project.home), load_config(project.config))
    return Faulty(project, disk.folder / "small" / "e2e")


@pytest.fixture(scope="module")
def mlflow(faulty: Faulty) -> Iterator[MlflowServer]:
    """The project's registry."""
    made = MlflowServer(faulty.project.config.parent, faulty.fuses)
    made.start()
    faulty.environment["MLFLOW_TRACKING_URI"] = made.url
    yield made
    made.end()


def test_an_interrupted_warm_start_restarts_and_gives_the_same_weights(faulty: Faulty, mlflow: MlflowServer):
    command = faulty.project.command("run", "--config", str(faulty.project.config), "--detach-engines")
    driver = subprocess.Popen(
        command, env=faulty.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )  # fmt: skip
    folder = faulty.checkpoints / "warm_start"
    wait_until(lambda: any(folder.glob("global_step_*/manifest.json")), "a segment of the warm start was saved")
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert not (faulty.home / "rounds" / "r0000" / "policy-policy.json").exists()

    assert faulty.drive(1)["errors"] == [None]
    first = faulty.project.note(0, "policy")
    assert first["folder"].endswith("global_step_20")
    measured = {point["step"]: "sampled_pass" in point for point in faulty.project.note(0, "warm_start")["curve"]}
    assert measured == {10: True, 20: False} and faulty.project.note(0, "evaluation")["results"]
    assert [(job, status) for job, status, _ in faulty.runs()] == [
        ("warm_start_job", "FAILURE"), ("warm_start_job", "SUCCESS"),
    ]  # fmt: skip

    # a damaged one is made again from the start: to the very same weights
    flip_a_byte(Path(first["folder"]) / "model.safetensors")
    faulty.kill("engine")  # what it holds in memory is whole: only a new one reads the file
    done = faulty.drive(3)
    assert done["launched"] == ["explore:1", "warm_start:0", "explore:1"]
    assert done["errors"] == ["DamageRepairedError", None, None]
    assert faulty.project.note(0, "policy")["weights_digest"] == first["weights_digest"]
    assert len(list((faulty.checkpoints / "aside").glob("damaged.*.why.json"))) == 1


def test_a_full_disk_stops_the_round_and_leaves_nothing_half_written(
    faulty: Faulty, mlflow: MlflowServer, disk: SmallDisk
):
    if not disk.mounted:
        pytest.skip("needs the right to mount a small file system")
    faulty.reach(0)
    if not (faulty.home / "rounds" / "r0001" / "judge.json").exists():
        faulty.drive(1)
    disk.resize(disk.used_mib + 4)  # a checkpoint takes thrice that
    done = faulty.drive(3)
    assert done["errors"] == ["DiskFullError"]  # no retry: it would find the disk as full
    assert "r0001 sync failed" in done["failed"]
    assert f"{faulty.checkpoints}/global_step_2: no space left on the disk" in done["failed"]
    assert "bytes are needed" in done["failed"]
    assert faulty.runs()[-1] == ("sync_round_job", "FAILURE", "storage")
    assert sorted(path.name for path in faulty.checkpoints.iterdir()) == ["aside", "warm_start"]

    disk.resize(256)
    assert faulty.drive(1) == {"launched": ["sync:1"], "errors": [None], "finished": False, "failed": None}


def test_an_engine_that_is_killed_mid_rollout_costs_one_retry(faulty: Faulty, mlflow: MlflowServer):
    faulty.reach(1)
    faulty.fuse("engine")
    done = faulty.drive(2)
    assert done["launched"] == ["explore:2", "explore:2"]
    assert done["errors"] == ["EngineError", None]
    assert faulty.runs()[-2] == ("explore_job", "FAILURE", "engine")
    rows = faulty.rows(2)
    assert rows.num_rows == len(set(rows["row_id"].to_pylist())) == 32
    assert set(rows["policy_version"].to_pylist()) == {2}


def test_damaged_rows_and_a_damaged_checkpoint_are_made_again_as_they_were(faulty: Faulty, mlflow: MlflowServer):
    faulty.reach(1)
    if not faulty.rows(2).num_rows:
        faulty.drive(1)
    rows, policy = faulty.rows(2), faulty.project.note(1, "policy")
    flip_a_byte(faulty.home / "rounds" / "r0002" / "rollouts" / "batch-0000.parquet")
    flip_a_byte(Path(policy["folder"]) / "trainer_state" / "optimizer.safetensors")
    faulty.kill("trainer")  # what it holds in memory is whole: only a new one reads the files
    done = faulty.drive(5)
    assert done["launched"] == ["sync:2", "explore:2", "sync:2", "sync:1", "sync:2"]
    assert done["errors"] == ["DamageRepairedError", None, "DamageRepairedError", None, None]
    assert {run[2] for run in faulty.runs()[-5:] if run[1] == "FAILURE"} == {"storage"}
    for column in ("row_id", "prompt_ids", "response_ids", "policy_version"):
        assert faulty.rows(2)[column].equals(rows[column]), column
    again = faulty.project.note(1, "policy")
    assert (again["folder"], again["weights_digest"]) == (policy["folder"], policy["weights_digest"])
    assert again["model_version"] == policy["model_version"]  # the same checkpoint is the same version
    assert [file.name for file in (faulty.home / "rounds" / "r0002" / "aside").glob("batch-0000*.parquet")]


def test_without_mlflow_a_round_trains_once_and_is_registered_later(faulty: Faulty, mlflow: MlflowServer):
    faulty.reach(2)
    faulty.fuse("mlflow")
    assert faulty.drive(1) == {"launched": ["explore:3"], "errors": [None], "finished": False, "failed": None}
    mlflow.end()
    started = time.monotonic()
    done = faulty.drive(1)
    assert time.monotonic() - started < 60
    assert done["errors"] == ["RegistryError"]
    assert faulty.runs()[-1] == ("sync_round_job", "FAILURE", "registry")
    policy = faulty.project.note(3, "policy")
    assert policy["model_version"] is None
    trained = digest_file(Path(policy["folder"]) / "manifest.json")

    mlflow.start()
    assert faulty.drive(1) == {"launched": ["sync:3"], "errors": [None], "finished": False, "failed": None}
    caught_up = faulty.project.note(3, "policy")
    assert caught_up["weights_digest"] == policy["weights_digest"]
    assert int(caught_up["model_version"]) == 3
    assert faulty.project.note(3, "train")["reused"]
    assert digest_file(Path(policy["folder"]) / "manifest.json") == trained  # written once


def test_weights_that_the_canary_refuses_stop_the_round_and_the_old_ones_stay(faulty: Faulty, mlflow: MlflowServer):
    faulty.reach(3)
    note = faulty.home / "rounds" / "r0003" / "policy-policy.json"
    policy, served = read_json(note), faulty.engine().status()
    assert served.policy_version == policy["policy_version"]
    other = perturbed(faulty.home / policy["folder"])
    write_sealed_json(note, policy | {"folder": str(other), "weights_digest": digest_file(other / "model.safetensors")})

    refused = faulty.run()
    assert refused.returncode == 1
    assert "r0004 explore failed" in refused.stderr
    assert "nats on average" in refused.stderr
    assert faulty.runs()[-1] == ("explore_job", "FAILURE", "engine")
    assert faulty.runs()[-2][1] == "SUCCESS"  # one launch: a retry would be refused likewise
    after = faulty.engine().status()
    assert (after.policy_version, after.weights_digest) == (served.policy_version, served.weights_digest)
    assert not (faulty.home / "rounds" / "r0004" / "evaluation.json").exists()
    write_sealed_json(note, policy)


def test_a_bug_in_the_judge_is_reported_with_its_line_and_the_run_continues_after_the_fix(
    faulty: Faulty, mlflow: MlflowServer
):
    faulty.reach(3)
    faulty.fuse("bug")
    failed = faulty.run()
    assert failed.returncode == 1
    assert "no digits today" in failed.stderr
    assert "faulty_code.py:" in failed.stderr
    assert faulty.runs()[-1] == ("explore_job", "FAILURE", "user_code")
    (faulty.fuses / "bug").unlink()
    mended = faulty.run()
    assert mended.returncode == 0, mended.stderr
    assert faulty.project.note(4, "policy")["policy_version"] == 8


def perturbed(checkpoint: Path) -> Path:
    """A copy of a checkpoint with one tensor changed, and a manifest that says so: only the canary can tell."""
    folder = checkpoint.parent / "perturbed" / checkpoint.name
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("mlp.down_proj.weight"))
    save_file(tensors | {name: tensors[name] + 0.05}, folder / "model.safetensors", metadata={"format": "pt"})
    manifest = read_json(folder / "manifest.json")
    file = folder / "model.safetensors"
    manifest["files"]["model.safetensors"] = {"size": file.stat().st_size, "sha256": digest_file(file)}
    write_sealed_json(folder / "manifest.json", manifest)
    return folder
