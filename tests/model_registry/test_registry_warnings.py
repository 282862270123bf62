"""Opening the store is quiet, however it comes about: what MLflow's libraries deprecate is nobody else's concern."""

import subprocess
import sys

import pytest

OPENINGS = {
    "a database is made": "from rft_platform.model_registry.mlflow_client import make_database; make_database(uri)",
    "a client is opened": "from rft_platform.model_registry.mlflow_client import open_client; open_client(uri)",
}


@pytest.mark.slow
@pytest.mark.parametrize("opening", OPENINGS)
def test_the_first_opening_of_a_process_warns_of_nothing(opening, tmp_path):
    code = (
        f"import warnings; warnings.simplefilter('error'); uri = 'sqlite:///{tmp_path}/mlflow.db'; {OPENINGS[opening]}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mlflow.db").exists()
