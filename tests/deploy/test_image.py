"""The image: pinned, unprivileged, made from the code alone; built where a container engine answers."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from scripts.lock import GPU, RUNTIME, read_pins
from tests.deploy.files import DEPLOY, REPOSITORY, text_of_all


def test_the_image_is_pinned_unprivileged_and_built_from_the_code_alone() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+$", dockerfile, re.MULTILINE)
    assert "USER 10001:10001" in dockerfile
    assert "HEALTHCHECK" in dockerfile
    allowed = [line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE)
    assert sorted(source for line in copied for source in line.split()) == sorted(allowed)
    for source in allowed:
        assert (REPOSITORY / source).exists(), source
    for images in re.findall(r"^\s+image: (\S+)$", text_of_all(), re.MULTILINE):
        assert images.startswith(("rft-platform", "${RFT_IMAGE")) or re.search(r":v?\d", images), (
            f"{images} is not pinned"
        )


def test_each_install_of_the_image_reads_one_index() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert "--extra-index-url" not in dockerfile
    for install in re.findall(r"pip install (.*)", dockerfile):
        assert "--require-hashes" in install or "torch.txt" in install or install.startswith("--no-deps"), install


def test_images_with_cuda_have_a_compiler() -> None:
    """Triton builds its stub of the driver at run time, and the slim image of Python has no compiler."""
    install = "apt-get install --yes --no-install-recommends gcc g++ libc6-dev"
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    branch = dockerfile[dockerfile.rindex("FROM ") :].partition("case ")[2].partition("esac")[0]
    for index, compiler in (("https://download.pytorch.org/whl/cpu", False), ("https://x/whl/cu130", True)):
        script = "apt-get() { echo apt-get $*; }; rm() { :; }; case " + branch.replace("\\\n", "") + "esac"
        done = subprocess.run(
            ["bash", "-c", script], env=os.environ | {"TORCH_INDEX_URL": index}, capture_output=True, text=True
        )
        assert (install in done.stdout) is compiler, (done.stdout, done.stderr)


def test_the_image_of_the_cluster_is_built_on_cuda() -> None:
    dockerfile = (DEPLOY / "kubernetes-cluster" / "Dockerfile").read_text()
    assert "torch" not in {pin.name for pin in read_pins(GPU.read_text())}, "so its base decides which build it has"
    (check,) = re.findall(r'^RUN /opt/rft/bin/python -c "(.*)"$', dockerfile, re.MULTILINE)
    for version, status in (("None", 1), ("'13.0'", 0)):
        fake = f"import sys; from types import SimpleNamespace as N;sys.modules['torch'] = N(version=N(cuda={version}))"
        done = subprocess.run([sys.executable, "-c", f"{fake}; {check}"], stderr=subprocess.DEVNULL)
        assert done.returncode == status
    for text in (dockerfile, (REPOSITORY / "docs" / "kubernetes.md").read_text()):
        (command,) = re.findall(r"make image (.*)", text)
        assert "TORCH_INDEX_URL=https://download.pytorch.org/whl/cu" in command


def test_the_image_has_the_driver_for_postgres() -> None:
    assert {"dagster-postgres", "psycopg2-binary"} <= {pin.name for pin in read_pins(RUNTIME.read_text())}


@pytest.mark.slow
def test_the_image_builds() -> None:
    engine = next((name for name in ("docker", "podman") if _engine_runs(name)), None)
    if engine is None:
        pytest.skip("needs a container engine: neither docker nor podman answers here, so the image was only linted")
    done = subprocess.run(
        [engine, "build", "-f", "deploy/Dockerfile", "-t", "rft-platform:test", "."],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    smoke = [engine, "run", "--rm", "rft-platform:test", "rft", "--help"]
    assert "rft" in subprocess.run(smoke, capture_output=True, text=True, timeout=120, check=True).stdout


def _engine_runs(name: str) -> bool:
    """A client alone is not enough: its engine has to answer."""
    if shutil.which(name) is None:
        return False
    return subprocess.run([name, "info"], capture_output=True, timeout=30).returncode == 0
