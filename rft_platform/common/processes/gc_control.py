"""Reduce the cost of garbage collection in processes that import large packages.

Scanning the objects of modules takes a fifth of the import time of transformers or MLflow, and a second at the end of
a process.
"""

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

#: Packages that transformers imports if they are installed, for decoding methods and losses that are not used here.
#: They take a quarter of the import time of transformers.
NOT_FOR_TRANSFORMERS = ("sklearn", "scipy")


@contextmanager
def importing(without: Iterable[str] = ()) -> Iterator[None]:
    """Disable garbage collection while the block imports large packages.

    In the block, packages named in ``without`` count as not installed, unless they are already imported.
    """
    was_enabled = gc.isenabled()
    absent = [name for name in without if name not in sys.modules]
    gc.disable()
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
        if was_enabled:
            gc.enable()


def keep_imports() -> None:
    """Exclude all existing objects from garbage collection for the rest of the process (``gc.freeze``).

    Call it before user code is loaded: the user's objects come later and are collected as usual.
    """
    gc.freeze()
