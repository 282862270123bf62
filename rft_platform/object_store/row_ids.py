"""An index of the row ids in a Parquet file: their 32-bit checksums in ascending order, 4 bytes a row.

Stored by the commit that stores the file of rows, so a home finds the file of a row among thousands that it has not.
A file that holds no such row is named once in a million rows or less.
"""

import zlib
from pathlib import Path

_COLUMN = "row_id"


def index_of(path: Path) -> bytes | None:
    """The index of a Parquet file; None if the file cannot be read."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        ids = pq.read_table(path, columns=[_COLUMN])[_COLUMN].to_pylist()
    except (pa.ArrowException, OSError):
        return None
    return np.sort(np.array([_checksum(each) for each in ids], "<u4")).tobytes()


def may_hold(index: bytes, row_id: str) -> bool:
    """Whether the indexed file may hold the row."""
    import numpy as np

    known, wanted = np.frombuffer(index, "<u4"), np.uint32(_checksum(row_id))
    place = int(np.searchsorted(known, wanted))
    return place < len(known) and bool(known[place] == wanted)


def _checksum(row_id: str) -> int:
    return zlib.crc32(row_id.encode())
