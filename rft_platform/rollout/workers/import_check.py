"""Check that the interpreter of the workers can import a workflow."""

from collections.abc import Mapping
from typing import Any

from rft_platform.cluster.child import AnswerTimeoutError, CallError, Child, ChildError
from rft_platform.common.errors import UserError
from rft_platform.rollout.workflow import resolve_workflow

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


def load(name: str, arguments: Mapping[str, Any]) -> None:
    """Load the workflow, in the child process."""
    resolve_workflow(name, arguments)
