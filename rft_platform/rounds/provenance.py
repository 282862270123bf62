"""Which code ran: the answer that lineage needs beside rows and weights."""

import subprocess
from functools import cache
from pathlib import Path

import rft_platform


@cache
def code_version() -> str:
    """Git commit of the working folder's repository, ``-dirty`` with local changes; else the package version."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty"],
            cwd=Path.cwd(), capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return f"rft-platform {rft_platform.__version__}"
    return described.stdout.strip()
