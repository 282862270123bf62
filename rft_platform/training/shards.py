"""Distributed tensors on disk: every rank writes its own shards, any number of ranks reads them back. No pickle.

PyTorch's distributed checkpoint (``torch.distributed.checkpoint``) plans and moves the bytes, in its Hugging Face
storage: safetensors files whose headers say which part of each tensor they hold. Its usual ``.metadata`` file, which is
a pickle, is never written, and its planning messages between ranks, pickles too, are not needed: what a rank writes
follows from its own shards, and what it reads from the headers of all files. So nothing is said between ranks here, and
the files may be written by a thread while training goes on.
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from rft_platform.errors import StorageError


def shard_file(name: str, rank: int, world_size: int) -> str:
    """Name of the file with the part of ``name`` that is ``rank``'s: ``<name>.safetensors`` where there is one rank."""
    return f"{name}.safetensors" if world_size == 1 else f"{name}-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in host memory; those of a GPU are copied to pinned memory, forty times as fast as to any other."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            found[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            found[name].copy_(tensor, non_blocking=True)
        else:
            found[name] = tensor
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return found


def write_shards(folder: Path, name: str, tensors: Mapping[str, Tensor], rank: int, world_size: int) -> None:
    """Write this rank's part of ``tensors`` into one file in ``folder``; of a tensor that is not sharded, rank 0 does.

    No file is written where nothing is this rank's. Every rank must name the same tensors.
    """
    mine = {key: tensor for key, tensor in tensors.items() if rank == 0 or isinstance(tensor, DTensor)}
    if not mine:
        return
    if world_size == 1:
        whole = {key: local_part(tensor).contiguous() for key, tensor in mine.items()}
        save_file(whole, folder / shard_file(name, rank, 1))
        return  # all is whole: the same file without a header of parts, in a third of the time
    work = folder / f"{shard_file(name, rank, world_size)}.parts"
    writer = HuggingFaceStorageWriter(str(work), save_distributed=True)
    writer.sync_files = world_size > 1  # a host's own cache holds it; one rank's files are synced by who publishes them
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(mine, is_coordinator=rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plan = planner.finish_plan(replace(plan, storage_data={"shard_index": rank + 1}))
    writer.write_data(plan, planner).wait()
    (written,) = work.iterdir()
    written.rename(folder / shard_file(name, rank, world_size))
    shutil.rmtree(work)


class ShardReader:
    """The tensors in the safetensors files of one folder, whoever wrote them and on how many ranks."""

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
        """Shape of a whole tensor."""
        saved = self._metadata.state_dict_metadata[name]
        assert isinstance(saved, TensorStorageMetadata)
        return tuple(saved.size)

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill the tensors of ``into``, of each rank its own shards, by name.

        Raises StorageError where one is missing or of another shape.
        """
        missing = sorted(set(into) - self.names)
        if missing:
            raise StorageError(
                f"{self._folder} lacks {len(missing)} of the {len(into)} tensors of this model, {missing[0]} for one: "
                "it was written for another model, or a file is missing"
            )
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(into), self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        try:
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
        except ValueError as error:
            raise StorageError(f"{self._folder} holds tensors of other shapes than this model's: {error}") from error
        self._reader.read_data(planner.finish_plan(plan), planner).wait()
