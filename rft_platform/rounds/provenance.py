"""Which code ran: the answer that lineage needs beside rows and weights."""

import subprocess
from functools import cache
from pathlib import Path

import rft_platform

_SOURCE = Path(rft_platform.__file__).resolve()


@cache
def code_version() -> str:
    """Git commit of the package's own repository, ``-dirty`` with local changes; else the package version.

    It is the same from every working folder, and a repository that merely contains an installed copy is not asked.
    """
    try:
        _git("ls-files", "--error-unmatch", _SOURCE.name)
        return _git("describe", "--always", "--abbrev=40", "--dirty")
    except (OSError, subprocess.SubprocessError):
        return f"rft-platform {rft_platform.__version__}"


def _git(*words: str) -> str:
    asked = subprocess.run(
        ["git", *words], cwd=_SOURCE.parent, capture_output=True, text=True, timeout=10, check=True
    )  # fmt: skip
    return asked.stdout.strip()
