"""Read the files in which Weights & Biases and SwanLab keep the points of a run until they are uploaded.

Both have the log format of LevelDB after a header of 7 bytes: blocks of 32 KiB with fragments of records. A fragment
has a checksum (4 bytes), a length (2) and a type (1 whole, 2 first, 3 middle, 4 last).
"""

import struct
from collections.abc import Iterator
from pathlib import Path

_HEADER, _BLOCK, _FRAGMENT = 7, 1 << 15, 7
_WHOLE, _LAST = 1, 4


def records(file: Path) -> Iterator[bytes]:
    """Yield the records of a file."""
    data, place, record = file.read_bytes(), _HEADER, b""
    while place + _FRAGMENT <= len(data):
        rest = _BLOCK - place % _BLOCK
        if rest < _FRAGMENT:
            place += rest
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + _FRAGMENT : place + _FRAGMENT + length]
        place += _FRAGMENT + length
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""
