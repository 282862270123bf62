"""Opening the store is quiet, however it comes about: what MLflow's libraries deprecate is nobody else's concern."""

import subprocess
import sys

import pytest

OPENINGS = {
    "a database is made": "from rft_platform.model_registry.mlflow_client import make_database; make_database(uri)",
    "a client is opened": "from rft_platform.model_registry.mlflow_client import open_client; open_client(uri)",
}
#: As the start of a project whose base model is in the registry: the engine's thread resolves it, this one prepares.
THREADS = """
from threading import Barrier
from concurrent.futures import ThreadPoolExecutor
from rft_platform.common.errors import UserError
from rft_platform.model_registry.models import ModelRegistry
start = Barrier(4)
def opened(number):
    registry = ModelRegistry(f"sqlite:///{folder}/{number}/mlflow.db", None, "p", "m")
    start.wait()
    if number % 2:
        return registry.prepare()
    try:
        return registry.resolve("models:/m@champion")
    except UserError:
        return "none"
with ThreadPoolExecutor(4) as pool:
    assert list(pool.map(opened, range(4))) == ["none", "1", "none", "1"]
"""


@pytest.mark.slow
@pytest.mark.parametrize("opening", OPENINGS)
def test_the_first_opening_in_a_process_gives_no_warning(opening, tmp_path):
    code = (
        f"import warnings; warnings.simplefilter('error'); uri = 'sqlite:///{tmp_path}/mlflow.db'; {OPENINGS[opening]}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "mlflow.db").exists()


@pytest.mark.slow
def test_threads_open_their_first_stores_at_the_same_time(tmp_path):
    """MLflow's imports and database migrations are made for one thread."""
    code = f"folder = {str(tmp_path)!r}\n{THREADS}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
