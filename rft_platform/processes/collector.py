"""The garbage collector at the start and the end of processes that import much.

Modules are made of so many objects that looking through them is a fifth of the time of importing transformers or
MLflow, and a second at the end of a process, when nothing needs to be found any more.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect nothing while the block imports something large."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def end_quickly() -> None:
    """Let this process end without a last look at every object; what ``atexit`` promises still happens."""
    atexit.register(gc.freeze)
