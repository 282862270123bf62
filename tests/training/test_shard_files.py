"""Files of the trainer state: the bytes that safetensors writes, on disk piece by piece, and their digest."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft_platform.common.files import digest_file
from rft_platform.training.models import shards
from rft_platform.training.models.shards import write_tensors

TENSORS = {
    "b.weight": torch.randn(7, 5),
    "a.weight": torch.randn(33, 3, dtype=torch.bfloat16),
    "step": torch.tensor(12, dtype=torch.int64),
    "mask": torch.tensor([True, False, True]),
    "none": torch.zeros(0, 4),
    "half": torch.randn(9).to(torch.float16),
    "double": torch.randn(2, 2, dtype=torch.float64),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "größe": torch.arange(3, dtype=torch.int32),
}


@pytest.mark.parametrize("piece", [1, 64, 2**26])
def test_the_bytes_are_those_of_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(shards, "_PIECE", piece)
    digest = write_tensors(tmp_path / "ours", TENSORS)
    save_file(TENSORS, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert digest == digest_file(tmp_path / "ours")
    read = load_file(tmp_path / "ours")
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_no_more_than_two_pieces_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = [0]
    waiting = []

    def fsync(number: int) -> None:
        waiting.append(os.fstat(number).st_size - synced[0])
        synced[0] = os.fstat(number).st_size

    monkeypatch.setattr(shards, "_PIECE", 1000)
    monkeypatch.setattr(shards.os, "fsync", fsync)
    write_tensors(tmp_path / "file", {"weight": torch.zeros(5000)})
    assert synced == [(tmp_path / "file").stat().st_size] and max(waiting) <= 2000 and len(waiting) >= 20


def test_an_error_of_the_disk_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shards.os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        write_tensors(tmp_path / "file", TENSORS)
