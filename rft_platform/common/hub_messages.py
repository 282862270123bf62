"""Silence the Hugging Face packages while the platform asks the hub: a failed request is an error in one line.

Without a network they log two lines for each of their retries.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_PACKAGES = ("huggingface_hub", "datasets")


@contextmanager
def without_hub_messages() -> Iterator[None]:
    """Hide warnings of the Hugging Face packages in the block. Import them before: an import sets their level."""
    loggers = [logging.getLogger(name) for name in _PACKAGES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
