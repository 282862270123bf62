"""Check that the interpreter of the workers can import a workflow: ``python -m ... NAME``.

The workflow's arguments are passed as JSON on standard input: they may be secret, and other users see command lines.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rft_platform.common.errors import UserError

_LIMIT_S = 120.0  # large frameworks on a slow disk


def check_importable(python: str, name: str, arguments: Mapping[str, Any]) -> None:
    """Raise UserError unless ``python`` can import the workflow ``name`` and pass it ``arguments``."""
    from rft_platform.rollout.workers.worker_process import worker_environment  # imports psutil

    command = [python, "-m", "rft_platform.rollout.workers.import_check", name]
    with TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command, env=worker_environment(python, Path(folder)), input=json.dumps(dict(arguments)),
                capture_output=True, text=True, timeout=_LIMIT_S, check=False, start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise UserError(f"workflow {name!r}: {python} needed more than {_LIMIT_S:.0f} s to import it") from None
        except OSError as error:
            raise UserError(f"explorer.workers.python {python}: cannot be run ({error.strerror or error})") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UserError(f"{reason} (explorer.workers.python {python})")


def main(name: str, arguments: str) -> int:
    """Import the workflow; returns the exit status."""
    from rft_platform.rollout.workflow import resolve_workflow

    try:
        resolve_workflow(name, json.loads(arguments))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.stdin.read()))
