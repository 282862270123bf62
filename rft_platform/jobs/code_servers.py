"""Replace a dead code server at once; Dagster's daemon alone would reload up to a minute later."""

import time
from typing import Any

from rft_platform.errors import RftError

_CHECK, _INTERVAL = "check_workspace_freshness", "RELOAD_WORKSPACE_INTERVAL"


def replace_dead_code_servers() -> None:
    """Make Dagster's daemon reload the workspace in its thread check if a code server is dead.

    Raises RftError if this Dagster version implements the check elsewhere.
    """
    from dagster._daemon import controller

    daemon = controller.DagsterDaemonController
    if not hasattr(daemon, _CHECK) or not hasattr(controller, _INTERVAL):
        raise RftError(
            f"dagster._daemon.controller has no {_CHECK} or {_INTERVAL}: this version of Dagster is not one that the "
            "platform was tried with; install the pinned one, or run `dagster-daemon` itself"
        )
    check, interval = getattr(daemon, _CHECK), float(getattr(controller, _INTERVAL))

    def check_and_replace(self: Any, last_reload: float) -> Any:
        due = time.time() - interval - 1.0
        return check(self, min(last_reload, due) if any_is_dead(self._grpc_server_registry) else last_reload)

    setattr(daemon, _CHECK, check_and_replace)


def any_is_dead(registry: Any) -> bool:
    """Whether one of the code servers in a daemon's registry has ended."""
    entries = list(registry._active_entries.values()) if registry is not None else []
    processes = [entry.process for entry in entries if hasattr(entry, "process")]
    return any(process.server_process.poll() is not None for process in processes)
