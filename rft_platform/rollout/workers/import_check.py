"""Check that workers can import a workflow, with another interpreter or in a runtime environment of a cluster."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.cluster.child import AnswerTimeoutError, CallError, ChildError
from rft_platform.common.errors import UserError
from rft_platform.common.threads import DaemonThreads
from rft_platform.common.user_code import user_folders
from rft_platform.rollout.workflow import resolve_workflow

if TYPE_CHECKING:
    from rft_platform.rollout.workflow import WorkerWorkflow

_LIMIT_S = 120.0  # large frameworks on a slow disk


def check_importable(workflow: "WorkerWorkflow") -> None:
    """Raise UserError unless a worker for ``workflow`` starts and imports it as the workers of a round do."""
    limit_s = _LIMIT_S + workflow.environment_s
    where, advice = f"explorer.workers.python {workflow.python}", ""
    if workflow.runtime_env:
        where = "in a worker with explorer.workers.runtime_env"
        advice = ": no node has room, or the environment takes longer (its config.setup_timeout_seconds)"
    try:
        # in a thread, because the caller may run in an event loop, as in a notebook
        DaemonThreads("import-check").submit(asyncio.run, asyncio.wait_for(_load_there(workflow), limit_s)).result()
    except (TimeoutError, AnswerTimeoutError):
        raise UserError(f"workflow {workflow.name!r}: not imported within {limit_s:.0f} s ({where}){advice}") from None
    except OSError as error:
        raise UserError(f"the worker cannot be run: {error.strerror or error} ({where})") from None
    except CallError as error:
        raise UserError(f"{error.text if error.kind == UserError.__name__ else error} ({where})") from None
    except ChildError as error:
        raise UserError(f"{error} ({where})") from None


async def _load_there(workflow: "WorkerWorkflow") -> None:
    from rft_platform.rollout.workers.worker_executor import starter  # workers do not need it

    log = Path(os.devnull) if workflow.cluster else None  # None: errors show the last line that the process printed
    worker = starter(workflow)(__name__, python=workflow.python, log=log)
    try:
        await worker.ask_async(load.__name__, workflow.name, dict(workflow.arguments), user_folders(), wall_s=_LIMIT_S)
    finally:
        worker.kill()


def load(name: str, arguments: Mapping[str, Any], folders: Sequence[str]) -> None:
    """Load the workflow, in the child process; ``folders`` are searched for modules after those of the process."""
    sys.path += [folder for folder in folders if folder not in sys.path]
    resolve_workflow(name, arguments)
