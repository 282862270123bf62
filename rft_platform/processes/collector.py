"""The garbage collector at the start and the end of processes that import much.

Modules are made of so many objects that looking through them is a fifth of the time of importing transformers or
MLflow, and a second at the end of a process.
"""

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

#: transformers loads these where they are installed, for kinds of decoding and losses that are not used here: a quarter
#: of its import.
NOT_FOR_TRANSFORMERS = ("sklearn", "scipy")


@contextmanager
def importing(without: Iterable[str] = ()) -> Iterator[None]:
    """Collect nothing while the block imports something large.

    Packages named in ``without`` count as not installed meanwhile, unless they are there already.
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
    """Take everything that is there now for needed until the process ends: it is never looked through again.

    For processes that have loaded no user code yet. A user's own objects come later, and are collected as ever.
    """
    gc.freeze()
