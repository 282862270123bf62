"""The wheel works without its source tree: the demo trains, and ``rft ui`` serves its pages.

The wheel is installed into its own environment. A ``.pth`` file gives that environment the third-party packages
of this one, so nothing is downloaded; the platform itself can only come from the wheel.
"""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from interface import Workplace, running_ui

REPOSITORY = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@dataclass(frozen=True)
class Installation(Workplace):
    """An environment with the wheel, and a home in an empty folder."""

    environment_folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The user's environment: the programs of the new one first, nothing that leads to the source tree."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        programs = f"{self.environment_folder / 'bin'}{os.pathsep}{kept['PATH']}"
        return {**kept, "PATH": programs, "RFT_HOME": str(self.home), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}

    def command(self, *arguments: str) -> list[str]:
        """The command line of the installed ``rft``."""
        return [str(self.environment_folder / "bin" / "rft"), *arguments]

    def run(self, *command: str) -> str:
        """Standard output of a command that succeeds."""
        done = subprocess.run(command, cwd=self.cwd, env=self.environment, capture_output=True, text=True, timeout=2000)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def package_files() -> set[str]:
    """Every file of the package in the source tree."""
    files = (file for file in (REPOSITORY / "rft_platform").rglob("*") if file.is_file())
    return {str(file.relative_to(REPOSITORY)) for file in files if "__pycache__" not in file.parts}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(REPOSITORY / "rft_platform", source / "rft_platform", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    shutil.rmtree(source)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel in a new environment."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", str(wheel))
    packages = "\n".join(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))
    (next((folder / "venv" / "lib").glob("python*")) / "site-packages" / "third_party.pth").write_text(packages)
    installation = Installation(folder / "work", folder / "venv")
    installation.cwd.mkdir()
    return installation


def pip(*arguments: str) -> None:
    """Run pip without an index."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [sys.executable, "-m", "pip", "--quiet", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == package_files()


def test_the_demo_trains(installed: Installation) -> None:
    place = installed.run("python", "-c", "import rft_platform; print(rft_platform.__file__)")
    assert Path(place.strip()).is_relative_to(installed.environment_folder)

    shown = installed.run("rft", "demo", "--rounds", "2")

    assert "held-out pass rate" in shown
    assert "r0002" in installed.run("rft", "rounds")
    assert "checkpoint" in installed.run("rft", "trace", "models:/arithmetic-demo@candidate")


def test_the_interface_serves_its_pages(installed: Installation) -> None:
    other = Installation(installed.cwd.with_name("interface"), installed.environment_folder)
    other.cwd.mkdir()
    other.run("rft", "new", "arithmetic")
    folder = other.cwd / "arithmetic"
    text = (folder / "rft.yaml").read_text().replace("path: tasks", f"path: {folder}/tasks")
    other.config.write_text(text.replace("model_path: model", f"model_path: {folder}/model"))
    with running_ui(other) as ui:
        headers = {"Authorization": f"Bearer {ui.token}"}
        page = httpx.get(ui.url, headers=headers, timeout=60, follow_redirects=True)
        assert page.status_code == 200 and "<html" in page.text
        assert httpx.get(ui.mlflow_url, headers=headers, timeout=60, follow_redirects=True).status_code == 200
        answer = ui.ask("{ assetNodes { assetKey { path } } }")
        assert ["policy_checkpoint"] in [node["assetKey"]["path"] for node in answer["assetNodes"]]
