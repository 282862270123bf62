"""Copies of host arrays to the device that do not wait for it."""

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy ``values`` to ``device`` without waiting for the work that the device has queued.

    CUDA copies asynchronously only from pinned memory. A copy from pageable memory waits until the stream is empty, so
    that the device idles while the host prepares the next pack.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
