"""Find or start all replicas of an engine concurrently, and assign GPUs to replicas."""

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from rft_platform.common.errors import EngineError, UserError
from rft_platform.config.gpu_placement import gpu_count, visible_devices
from rft_platform.inference.client import EngineClient
from rft_platform.inference.pool.engine_pool import EnginePool

LOG = logging.getLogger(__name__)


def find_or_start_pool(count: int, start: Callable[[int], EngineClient], engines_per_gpu: int = 1) -> EnginePool:
    """A pool of ``count`` replicas. ``start(number)`` finds or starts a replica, now and whenever the replica is lost.

    Replicas that share a GPU start one after the other, because vLLM measures the GPU's free memory while it starts.
    A replica that does not start is marked down and retried later. Raises UserError for wrong settings, and
    EngineError, naming each replica, if none starts.
    """
    on_each_gpu = [range(first, min(first + engines_per_gpu, count)) for first in range(0, count, engines_per_gpu)]
    with ThreadPoolExecutor(len(on_each_gpu)) as threads:
        starts = [future for own in threads.map(partial(_start_in_turn, start), on_each_gpu) for future in own]
    clients, down = {}, {}
    for number, future in enumerate(starts):
        error = future.exception()
        if error is None:
            clients[number] = future.result()
        elif isinstance(error, EngineError):
            LOG.warning("replica %d of the engine does not start: %s", number, error)
            down[number] = str(error)
        else:
            raise error
    pool = EnginePool(clients, start, down)
    if not clients:
        raise pool.replicas.none_left()
    return pool


def _start_in_turn(start: Callable[[int], EngineClient], numbers: Iterable[int]) -> list[Future[EngineClient]]:
    """Call ``start`` for each number, one after the other; a future holds the result or the error of a call."""
    with ThreadPoolExecutor(1) as thread:
        return [thread.submit(start, number) for number in numbers]


def engine_devices(own: range) -> str:
    """CUDA_VISIBLE_DEVICES of an engine process that uses the caller's GPUs at the positions ``own``.

    Raises UserError if there are too few devices.
    """
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None and not gpu_count():
        return devices
    if devices is not None and own.stop > gpu_count():
        raise UserError(
            f"explorer.rollout_model.engine_num: an engine needs devices {own.start} to {own.stop - 1} of "
            f"CUDA_VISIBLE_DEVICES={devices}; lower engine_num or tensor_parallel_size, or add devices to the variable"
        )
    return visible_devices(own)
