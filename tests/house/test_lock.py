"""The lock files: complete, hashed, current, and free of anything that belongs to one machine."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.lock import (
    BESIDE,
    DEVELOPMENT,
    DEVELOPMENT_EXTRAS,
    GPU,
    GPU_EXTRAS,
    GPU_PLATFORM,
    REPOSITORY,
    REQUIREMENTS,
    RUNTIME,
    RUNTIME_EXTRAS,
    TORCH,
    VLLM,
    Pin,
    read_pins,
)  # fmt: skip

LOCKS = [
    RUNTIME,
    DEVELOPMENT,
    GPU,
    VLLM,
    *(REQUIREMENTS / f"{name}.txt" for name in BESIDE),
    *sorted(REPOSITORY.glob("examples/*/lock*.txt")),
]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def pins_of(*locks: Path) -> dict[str, Pin]:
    return {pin.name: pin for lock in locks for pin in read_pins(lock.read_text())}


def requirements_of(*extras: str) -> list[Requirement]:
    groups = PROJECT["project"]["optional-dependencies"]
    return [
        Requirement(text) for text in [*PROJECT["project"]["dependencies"], *(r for e in extras for r in groups[e])]
    ]


def torch_version() -> str:
    pinned = [line for line in TORCH.read_text().splitlines() if not line.startswith("#")]
    assert len(pinned) == 1, "requirements/torch.txt pins torch and nothing else"
    return pinned[0].removeprefix("torch==")


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: str(lock.relative_to(REPOSITORY)))
def test_every_entry_has_a_hash_and_no_line_names_an_index_or_a_path(lock: Path) -> None:
    text = lock.read_text()
    pins = read_pins(text)  # refuses any line that is no pinned entry
    assert pins
    assert [pin.name for pin in pins if not pin.hashes] == []
    assert not re.search(r"https?://|file:|--(extra-)?index|--find-links|--trusted-host|\s/\w+/", text)
    assert "torch" not in {pin.name for pin in pins}


@pytest.mark.parametrize(
    ("locks", "extras"),
    [((RUNTIME,), RUNTIME_EXTRAS), ((RUNTIME, DEVELOPMENT), DEVELOPMENT_EXTRAS), ((GPU,), GPU_EXTRAS)],
    ids=["runtime", "development", "gpu"],
)
def test_the_lock_has_what_pyproject_asks_for_and_nothing_that_it_no_longer_asks_for(
    locks: tuple[Path, ...], extras: tuple[str, ...]
) -> None:
    pins = pins_of(*locks)
    requirements = {canonicalize_name(r.name): r for r in requirements_of(*extras)}
    for name, requirement in requirements.items():
        version = torch_version() if name == "torch" else pins[name].version if name in pins else None
        assert version is not None, f"{name} is not locked: run make lock"
        assert requirement.specifier.contains(version), f"{requirement} excludes the locked {version}: run make lock"
    direct = {
        pin.name for pin in read_pins(locks[-1].read_text()) if any("pyproject.toml" in by for by in pin.needed_by)
    }
    # A runtime package that others need may be asked for by the extra `dev` as well.
    asked_for = {canonicalize_name(r.name) for r in requirements_of(*RUNTIME_EXTRAS, *DEVELOPMENT_EXTRAS, *extras)}
    assert direct <= asked_for, "no longer in pyproject.toml: run make lock"


def test_the_two_lock_files_share_no_package() -> None:
    assert not pins_of(RUNTIME).keys() & pins_of(DEVELOPMENT).keys()


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0", "3.13.0"])
def test_the_gpu_lock_has_one_version_of_each_package_and_only_on_its_platform(python: str) -> None:
    gpu_host = {"sys_platform": "linux", "platform_machine": "x86_64", "python_full_version": python}
    mac = gpu_host | {"sys_platform": "darwin", "platform_machine": "arm64"}
    pins = read_pins(GPU.read_text())
    markers = [(pin.name, Marker(pin.marker or GPU_PLATFORM)) for pin in pins]
    installed = [name for name, marker in markers if marker.evaluate(gpu_host)]
    assert len(installed) == len(set(installed)) and set(installed) == {pin.name for pin in pins}
    assert [name for name, marker in markers if marker.evaluate(mac)] == []
    assert {"vllm", "triton", "nvidia-nccl-cu13"} <= set(installed), "vLLM and the libraries of torch's CUDA build"


def test_the_gpu_lock_differs_from_the_lock_only_where_vllm_needs_it() -> None:
    platform, gpu = pins_of(RUNTIME, DEVELOPMENT), read_pins(GPU.read_text())
    other = {pin.name for pin in gpu if pin.name in platform and pin.version != platform[pin.name].version}
    assert other <= {"fastapi", "numpy", "setuptools"}, "the tests of the platform run with other versions of these"


@pytest.mark.slow
@pytest.mark.parametrize("locks", [(RUNTIME,), (RUNTIME, DEVELOPMENT)], ids=["runtime", "development"])
def test_what_a_locked_package_needs_is_locked(locks: tuple[Path, ...]) -> None:
    """Nothing is left to the resolver, for the set-up installs without dependencies."""
    pins = pins_of(*locks)
    missing = []
    for pin in pins.values():
        try:
            needs = distribution(pin.name).requires or []
        except PackageNotFoundError:
            continue  # of another platform, or this environment is older than the lock
        for need in map(Requirement, needs):
            extras = {"", *(e for r in _requirements_on(pin.name, pins) for e in r.extras)}
            applies = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras)
            if applies and canonicalize_name(need.name) not in {*pins, "torch"}:
                missing.append(f"{pin.name} needs {need}")
    assert missing == []


def _requirements_on(name: str, pins: dict[str, Pin]) -> list[Requirement]:
    """What pyproject.toml asks of ``name``, with its extras."""
    return [r for r in requirements_of(*RUNTIME_EXTRAS, *DEVELOPMENT_EXTRAS) if canonicalize_name(r.name) == name]


def test_torch_is_resolved_as_the_version_that_is_pinned() -> None:
    entry = next(e for e in PROJECT["tool"]["uv"]["dependency-metadata"] if e["name"] == "torch")
    assert entry["version"] == torch_version()
    pins = pins_of(RUNTIME)
    for need in map(Requirement, entry["requires-dist"]):
        assert need.specifier.contains(pins[canonicalize_name(need.name)].version)
    installed = distribution("torch")
    if installed.version.split("+")[0] == entry["version"]:
        needs = [r for r in map(Requirement, installed.requires or ()) if r.marker is None]
        assert {r.name.lower() for r in needs} == {Requirement(r).name for r in entry["requires-dist"]}


def test_the_lock_of_an_example_satisfies_its_requirements() -> None:
    sources = sorted(REPOSITORY.glob("examples/*/requirements*.txt"))
    assert len(sources) == len(LOCKS) - 7
    for source in [*sources, VLLM.with_suffix(".in")]:
        lock = VLLM if source.suffix == ".in" else source.with_name(source.name.replace("requirements", "lock"))
        pins = pins_of(lock)
        for line in source.read_text().splitlines():
            if line and not line.startswith("#"):
                requirement = Requirement(line)
                pin = pins.get(canonicalize_name(requirement.name))
                assert pin is not None and requirement.specifier.contains(pin.version), f"{lock}: {line}: run make lock"


@pytest.mark.parametrize("line", ["numpy>=2", "--index-url https://example.org/simple", "-r other.txt", "./local"])
def test_a_line_that_is_no_pinned_entry_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="unexpected line"):
        read_pins(f"# head\nattrs==26.1.0 \\\n    --hash=sha256:{'0' * 64}\n{line}\n")


def test_the_set_up_installs_from_the_locks_alone() -> None:
    """No file names its own pin, and each pip install checks hashes, but for torch and the platform itself."""
    files = [
        REPOSITORY / "deploy" / "Dockerfile",
        *REPOSITORY.glob("scripts/*.sh"),
        *REPOSITORY.glob("examples/*/setup.sh"),
    ]
    for file in files:
        text = file.read_text().replace("\\\n", " ")
        installs = re.findall(r"pip\"? install(.*)", text)
        by_npm = "npm ci" in text and "npm install" not in text  # only what package-lock.json names, with digests
        assert installs or by_npm or file.name not in ("Dockerfile", "setup.sh"), file
        for install in installs:
            exempt = "requirements/torch.txt" in install or "--no-build-isolation" in install
            assert exempt or ("--require-hashes" in install and "--no-deps" in install), f"{file}: {install}"
