"""Check that workers can import a workflow, with another interpreter or in a runtime environment of a cluster."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.cluster.child import AnswerTimeoutError, CallError, Child, ChildError
from rft_platform.common.errors import UserError
from rft_platform.common.threads import DaemonThreads
from rft_platform.common.user_code import user_folders
from rft_platform.rollout.workflow import resolve_workflow

if TYPE_CHECKING:
    from rft_platform.rollout.workflow import WorkerWorkflow

_LIMIT_S = 120.0  # large frameworks on a slow disk


def check_importable(python: str, name: str, arguments: Mapping[str, Any]) -> None:
    """Raise UserError unless ``python`` can import the workflow ``name`` and pass it ``arguments``."""
    try:
        with Child(__name__, python=python) as child:
            child.ask(load.__name__, name, dict(arguments), wall_s=_LIMIT_S)
    except OSError as error:
        raise UserError(f"explorer.workers.python {python}: cannot be run ({error.strerror or error})") from None
    except AnswerTimeoutError:
        raise UserError(f"workflow {name!r}: {python} needed more than {_LIMIT_S:.0f} s to import it") from None
    except CallError as error:
        reason = error.text if error.kind == UserError.__name__ else str(error)
        raise UserError(f"{reason} (explorer.workers.python {python})") from None
    except ChildError as error:
        raise UserError(f"{error} (explorer.workers.python {python})") from None


def check_importable_there(workflow: "WorkerWorkflow") -> None:
    """Raise UserError unless a worker of the workflow's cluster has its runtime environment and can import it."""
    limit_s = _LIMIT_S + workflow.environment_s
    try:
        # in a thread, because the caller may run in an event loop, as in a notebook
        DaemonThreads("import-check").submit(asyncio.run, asyncio.wait_for(_load_there(workflow), limit_s)).result()
    except (TimeoutError, AnswerTimeoutError):
        raise UserError(
            f"workflow {workflow.name!r}: no worker with explorer.workers.runtime_env has imported it within "
            f"{limit_s:.0f} s: no node has room, or the environment takes longer (its config.setup_timeout_seconds)"
        ) from None
    except OSError as error:
        raise UserError(f"explorer.workers.python {workflow.python}: cannot be run ({error})") from None
    except CallError as error:
        reason = error.text if error.kind == UserError.__name__ else str(error)
        raise UserError(f"{reason} (in a worker with explorer.workers.runtime_env)") from None


async def _load_there(workflow: "WorkerWorkflow") -> None:
    from rft_platform.rollout.workers.worker_executor import starter  # workers do not need it

    worker = starter(workflow)(__name__, python=workflow.python, log=Path(os.devnull))
    try:
        await worker.ask_async(load.__name__, workflow.name, dict(workflow.arguments), user_folders(), wall_s=_LIMIT_S)
    finally:
        worker.kill()


def load(name: str, arguments: Mapping[str, Any], folders: Sequence[str] = ()) -> None:
    """Load the workflow, in the child process; ``folders`` are searched for modules after those of the process."""
    sys.path += [folder for folder in folders if folder not in sys.path]
    resolve_workflow(name, arguments)
