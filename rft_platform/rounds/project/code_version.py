"""The version of the running code, for lineage."""

import subprocess
from functools import cache
from pathlib import Path

import rft_platform

_SOURCE = Path(rft_platform.__file__).resolve()


@cache
def code_version() -> str:
    """Git commit of the package's own repository, ``-dirty`` with local changes; otherwise the package version.

    The result does not depend on the working directory. A repository that only contains an installed copy is ignored.
    """
    try:
        _git("ls-files", "--error-unmatch", _SOURCE.name)
        return _git("describe", "--always", "--abbrev=40", "--dirty")
    except (OSError, subprocess.SubprocessError):
        return f"rft-platform {rft_platform.__version__}"


def _git(*words: str) -> str:
    result = subprocess.run(
        ["git", *words], cwd=_SOURCE.parent, capture_output=True, text=True, timeout=10, check=True
    )  # fmt: skip
    return result.stdout.strip()
