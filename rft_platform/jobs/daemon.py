"""Run Dagster's daemon with a sensor polling interval below Dagster's default of 5 seconds.

``python -m rft_platform.jobs.daemon run -w workspace.yaml`` takes the options of ``dagster-daemon``. Only one can run
per home. A plain ``dagster-daemon`` works too, but its sensors tick every 5 seconds at best, and after the clock was
set back they wait until it has caught up.
"""

import sys
from types import ModuleType

from rft_platform.config.home import Home
from rft_platform.errors import RftError, UserError
from rft_platform.jobs.code_servers import replace_dead_code_servers
from rft_platform.jobs.instance import end_stranded_launches, open_instance
from rft_platform.jobs.sole import sole_holder
from rft_platform.jobs.timing import sensor_interval_s
from rft_platform.processes.collector import keep_imports

_LOOP, _ELAPSED = "MIN_INTERVAL_LOOP_TIME", "get_elapsed"


def main() -> None:
    """Run the daemon until it is interrupted; exit code 2 if another one serves this home."""
    from dagster._daemon import sensor
    from dagster._daemon.cli import main as dagster_daemon

    keep_imports()
    home = Home.from_environment()
    try:
        with sole_holder(home.leases / "daemon.lock", f"the daemon of {home.root}"):
            hasten(sensor, sensor_interval_s())
            replace_dead_code_servers()
            with open_instance(home) as instance:
                end_stranded_launches(instance)
            dagster_daemon()
    except RftError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UserError) else 1) from None


def hasten(sensor_daemon: ModuleType, interval_s: int) -> None:
    """Lower the interval of Dagster's sensor loop to ``interval_s``, and make it tolerate a clock that was set back.

    Raises RftError if this Dagster version has these settings elsewhere.
    """
    missing = [name for name in (_LOOP, _ELAPSED) if not hasattr(sensor_daemon, name)]
    if missing:
        raise RftError(
            f"dagster._daemon.sensor has no {', '.join(missing)}: this version of Dagster is not one that the platform "
            "was tried with; install the pinned one, or run `dagster-daemon` itself"
        )
    elapsed = getattr(sensor_daemon, _ELAPSED)

    def elapsed_however_the_clock_was_set(state: object) -> float | None:
        seconds: float | None = elapsed(state)
        return None if seconds is None or seconds < 0 else seconds  # the last tick is in the future: tick now

    setattr(sensor_daemon, _LOOP, min(getattr(sensor_daemon, _LOOP), interval_s))
    setattr(sensor_daemon, _ELAPSED, elapsed_however_the_clock_was_set)


if __name__ == "__main__":
    main()
