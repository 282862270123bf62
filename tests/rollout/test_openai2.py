"""The same recording with the older client: openai 2.x, which is built on another HTTP package than 3.x."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
TESTS = ["test_recording.py", "test_routing.py", "test_gateway.py", "test_endpoints.py"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_openai_2() -> None:
    named = os.environ.get("RFT_OPENAI2_PYTHON") or str(FOLDER.parents[1] / ".venv-openai2" / "bin" / "python")
    python = shutil.which(named)
    if python is None:
        pytest.skip(f"needs openai 2.x: {named} is not there (make agent-envs, or RFT_OPENAI2_PYTHON)")
    version = subprocess.run(
        [python, "-c", "import openai; print(openai.__version__)"], capture_output=True, text=True, check=True
    )
    assert version.stdout.startswith("2."), f"{python} has openai {version.stdout}"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    paths = [str(FOLDER.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]  # tests use the tools beside them
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
