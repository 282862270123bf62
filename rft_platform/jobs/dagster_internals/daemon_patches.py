"""Patches of Dagster's daemon: a shorter sensor loop, and dead code servers that are replaced at once.

Each patch checks that this version of Dagster has the parts that the patch replaces, and raises RftError otherwise.
"""

import time
from types import ModuleType
from typing import Any

from dagster._daemon import controller, sensor
from dagster._daemon.cli import main as run_dagster_daemon

from rft_platform.common.errors import RftError

__all__ = ["patch_daemon", "replace_dead_code_servers", "run_dagster_daemon", "shorten_sensor_loop"]

_LOOP, _ELAPSED = "MIN_INTERVAL_LOOP_TIME", "get_elapsed"
_CHECK, _INTERVAL = "check_workspace_freshness", "RELOAD_WORKSPACE_INTERVAL"


def patch_daemon(sensor_interval_s: int) -> None:
    """Apply both patches to this process, which then calls ``run_dagster_daemon``."""
    shorten_sensor_loop(sensor, sensor_interval_s)
    replace_dead_code_servers()


def shorten_sensor_loop(sensor_daemon: ModuleType, interval_s: int) -> None:
    """Lower the interval of Dagster's sensor loop to ``interval_s``, and make it tolerate a clock that was set back.

    Raises RftError if this Dagster version has these settings elsewhere.
    """
    missing = [name for name in (_LOOP, _ELAPSED) if not hasattr(sensor_daemon, name)]
    if missing:
        raise RftError(
            f"dagster._daemon.sensor has no {', '.join(missing)}: this version of Dagster is not supported; "
            "install the pinned version, or run `dagster-daemon` itself"
        )
    elapsed = getattr(sensor_daemon, _ELAPSED)

    def elapsed_unless_negative(state: object) -> float | None:
        seconds: float | None = elapsed(state)
        return None if seconds is None or seconds < 0 else seconds  # the last tick is in the future: tick now

    setattr(sensor_daemon, _LOOP, min(getattr(sensor_daemon, _LOOP), interval_s))
    setattr(sensor_daemon, _ELAPSED, elapsed_unless_negative)


def replace_dead_code_servers() -> None:
    """Make Dagster's daemon reload the workspace in its thread check if a code server is dead.

    Raises RftError if this Dagster version implements the check elsewhere.
    """
    daemon = controller.DagsterDaemonController
    if not hasattr(daemon, _CHECK) or not hasattr(controller, _INTERVAL):
        raise RftError(
            f"dagster._daemon.controller has no {_CHECK} or {_INTERVAL}: this version of Dagster is not "
            "supported; install the pinned version, or run `dagster-daemon` itself"
        )
    check, interval = getattr(daemon, _CHECK), float(getattr(controller, _INTERVAL))

    def check_and_replace(self: Any, last_reload: float) -> Any:
        due = time.time() - interval - 1.0
        return check(self, min(last_reload, due) if _any_is_dead(self._grpc_server_registry) else last_reload)

    setattr(daemon, _CHECK, check_and_replace)


def _any_is_dead(registry: Any) -> bool:
    """Whether one of the code servers in a daemon's registry has ended."""
    entries = list(registry._active_entries.values()) if registry is not None else []
    processes = [entry.process for entry in entries if hasattr(entry, "process")]
    return any(process.server_process.poll() is not None for process in processes)
