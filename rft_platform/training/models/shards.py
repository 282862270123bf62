"""Sharded tensors on disk: every rank writes its own shards; any number of ranks reads them back. No pickle.

PyTorch's distributed checkpoint (``torch.distributed.checkpoint``) plans and moves the bytes, with its Hugging Face
storage: safetensors files whose headers name the part of each tensor that they hold. Its ``.metadata`` file is a pickle
and is never written. Its planning messages between ranks are pickles too and are not needed: each rank writes its own
shards, and the headers of all files determine which parts it reads. The ranks therefore do not communicate here, and a
thread may write the files while training continues.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from rft_platform.common.errors import StorageError

#: Names of the types in the format, in the order in which ``save_file`` sorts tensors, largest last.
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32",
    torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
_PIECE = 2**26  # bytes that are written between two fsyncs
TRAINER_STATE = "trainer_state"  # folder of a checkpoint that holds the trainer's state
OPTIMIZER, MASTER = "optimizer", "master"  # sharded files in this folder: AdamW's moments, float32 weights


def shard_file(name: str, rank: int, world_size: int) -> str:
    """Name of the file with ``rank``'s part of ``name``; ``<name>.safetensors`` if there is one rank."""
    return f"{name}.safetensors" if world_size == 1 else f"{name}-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_host(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors in host memory. GPU tensors are copied to pinned memory, which is 40 times as fast."""
    copies, on_gpu = {}, False
    for name, tensor in tensors:
        if tensor.is_cuda:
            on_gpu = True
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies[name].copy_(tensor, non_blocking=True)
        else:
            copies[name] = tensor
    if on_gpu:
        torch.cuda.synchronize()
    return copies


def write_shards(folder: Path, name: str, tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[Path, str]:
    """Write this rank's part of ``tensors`` into one file in ``folder``. Rank 0 writes tensors that are not sharded.

    A rank with nothing to write makes no file. Every rank must pass the same names. Returns the sha256 of the file if
    it is known without reading the file again.
    """
    mine = {key: tensor for key, tensor in tensors.items() if rank == 0 or isinstance(tensor, DTensor)}
    if not mine:
        return {}
    if world_size == 1:  # full tensors: a file without a header of parts
        file = folder / shard_file(name, rank, 1)
        whole = on_host((key, local_part(tensor).contiguous()) for key, tensor in mine.items())
        return {file: write_tensors(file, whole)}
    work = folder / f"{shard_file(name, rank, world_size)}.parts"
    writer = HuggingFaceStorageWriter(str(work), save_distributed=True)
    writer.sync_files = world_size > 1  # another host may read the files; with one rank the publisher syncs them
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(mine, is_coordinator=rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plan = planner.finish_plan(replace(plan, storage_data={"shard_index": rank + 1}))
    writer.write_data(plan, planner).wait()
    (written,) = work.iterdir()
    written.rename(folder / shard_file(name, rank, world_size))
    shutil.rmtree(work)
    return {}


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write contiguous tensors on the host into a safetensors file, piece by piece; return the file's sha256.

    The bytes are those of ``safetensors.torch.save_file``. A piece is on the disk before the next but one is written.
    ``save_file`` writes at the speed of memory instead: gigabytes then wait for the disk, and on ext4 the fsyncs of all
    other processes wait with them. The format: https://github.com/huggingface/safetensors#format.
    """
    rank = {dtype: place for place, dtype in enumerate(_DTYPES)}
    names = sorted(tensors, key=lambda name: (-rank[tensors[name].dtype], name))
    entries: dict[str, Any] = {}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        entries[name] = {"dtype": _DTYPES[tensors[name].dtype], "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    digest = hashlib.sha256()
    with file.open("wb", buffering=0) as written, ThreadPoolExecutor(1) as pool:
        synced: Future[None] | None = None
        for piece in _pieces(len(header).to_bytes(8, "little") + header, [tensors[name] for name in names]):
            _write_all(written, piece)
            if synced is not None:
                synced.result()
            synced = pool.submit(os.fsync, written.fileno())
            digest.update(piece)
        assert synced is not None
        synced.result()
    return digest.hexdigest()


def _pieces(header: bytes, tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for tensor in tensors:
        content = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
        yield from (content[start : start + _PIECE] for start in range(0, len(content), _PIECE))


def _write_all(file: FileIO, piece: memoryview) -> None:
    while len(piece):
        piece = piece[file.write(piece) :]


class ShardReader:
    """Reads the tensors of the safetensors files in a folder, written by any number of ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = HuggingFaceStorageReader(str(folder))
        try:
            self._metadata = self._reader.read_metadata()
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise StorageError(f"{folder}: its safetensors files cannot be read: {error}") from error

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._metadata.state_dict_metadata)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full tensor."""
        saved = self._metadata.state_dict_metadata[name]
        assert isinstance(saved, TensorStorageMetadata)
        return tuple(saved.size)

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill the tensors of ``into`` by name; sharded tensors with this rank's shards.

        Raises StorageError if a tensor is missing or has another shape.
        """
        missing = sorted(set(into) - self.names)
        if missing:
            raise StorageError(
                f"{self._folder} lacks {len(missing)} of the {len(into)} tensors of this model, e.g. {missing[0]}: "
                "the folder was written for another model, or a file is missing"
            )
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(into), self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        try:
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
        except ValueError as error:
            raise StorageError(f"{self._folder} holds tensors of other shapes than this model's: {error}") from error
        self._reader.read_data(planner.finish_plan(plan), planner).wait()
