"""The garbage collector at the start and the end of processes that import much.

Modules are made of so many objects that looking through them is a fifth of the time of importing transformers or
MLflow, and a second at the end of a process.
"""

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


def keep_imports() -> None:
    """Take everything that is there now for needed until the process ends: it is never looked through again.

    For processes that have loaded no user code yet. A user's own objects come later, and are collected as ever.
    """
    gc.freeze()
