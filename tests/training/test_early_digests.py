"""Digests that are computed while other files of a checkpoint are written: never those of a file that changed later."""

import hashlib
import time
from pathlib import Path

import pytest

from rft_platform.training.checkpoint import manifest
from rft_platform.training.checkpoint.manifest import EarlyDigests, describe_files


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read, in order."""
    names: list[str] = []
    digest = manifest.digest_file

    def reading(path: Path) -> str:
        names.append(path.name)
        return digest(path)

    monkeypatch.setattr(manifest, "digest_file", reading)
    return names


def wait_until_read(read: list[str], count: int) -> None:
    """Wait until ``count`` files were read early."""
    end = time.monotonic() + 20
    while len(read) < count:
        assert time.monotonic() < end, f"only {read} were read"
        time.sleep(0.01)


def test_a_finished_file_is_read_once_and_a_changed_one_again(tmp_path: Path, read: list[str]) -> None:
    contents = {f"{name}.safetensors": name.encode() * 1000 for name in ("first", "second", "third")}
    with EarlyDigests(tmp_path) as early:
        for name in ("first.safetensors", "second.safetensors"):
            (tmp_path / name).write_bytes(contents[name])
        wait_until_read(read, 2)
        contents["first.safetensors"] = b"x" + contents["first.safetensors"][1:]  # the same size
        (tmp_path / "first.safetensors").write_bytes(contents["first.safetensors"])
        (tmp_path / "third.safetensors").write_bytes(contents["third.safetensors"])
        files = describe_files(tmp_path, early.digest)
    expected = {n: {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in contents.items()}
    assert files == expected
    assert read.count("second.safetensors") == 1


def test_a_growing_file_is_never_described_by_a_part(tmp_path: Path, read: list[str]) -> None:
    path, content = tmp_path / "slow.safetensors", b""
    with EarlyDigests(tmp_path) as early, path.open("wb") as file:
        for number in range(4):  # a writer that pauses for longer than a finished file is quiet
            part = bytes([number]) * 5000
            content += part
            file.write(part)
            file.flush()
            wait_until_read(read, number + 1)
        assert early.digest(path) == hashlib.sha256(content).hexdigest()
    assert len(read) == 4


def test_a_removed_file_does_no_harm(tmp_path: Path, read: list[str]) -> None:
    with EarlyDigests(tmp_path) as early:
        (tmp_path / "gone.safetensors").write_bytes(b"1")
        wait_until_read(read, 1)
        (tmp_path / "gone.safetensors").unlink()
        (tmp_path / "kept.json").write_bytes(b"2")
        assert list(describe_files(tmp_path, early.digest)) == ["kept.json"]
