"""Peak floating-point throughput of a device, the denominator of model FLOPs utilisation (MFU)."""

import functools
import time

import torch

#: Part of the device name -> dense bfloat16 and float32 (without TF32) TFLOP/s, from the vendors' data sheets.
_DATA_SHEETS = {
    "B200": (2250.0, 75.0),
    "H200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.0, 67.0),
    "H800": (989.0, 67.0),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "A10G": (70.0, 31.2),
    "A10": (125.0, 31.2),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
    "MI300X": (1307.0, 163.4),
}
_LARGEST = {"cpu": 512, "cuda": 8192}  # side of the matrices of a measurement, if the table lacks the device
_TRIES = 8


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of one device in ``dtype``: from its data sheet, else the best of a few matrix products.

    A CPU is always measured: once per process and number of threads, in about 50 ms.
    """
    if device.type == "cuda":
        known = _from_data_sheet(torch.cuda.get_device_name(device), dtype)
        if known is not None:
            return known
    return _measured(device, dtype, torch.get_num_threads())


def _from_data_sheet(name: str, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of the GPU called ``name``; None if the table does not list it."""
    words = name.replace("-", " ")
    found = next((peaks for part, peaks in _DATA_SHEETS.items() if f" {part} " in f" {words} "), None)
    return None if found is None else 1e12 * found[dtype == torch.float32]


@functools.cache
def _measured(device: torch.device, dtype: torch.dtype, _threads: int) -> float:
    side = _LARGEST.get(device.type, _LARGEST["cpu"])
    matrix = torch.ones(side, side, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(_TRIES):
        _wait(device)
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * side**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
