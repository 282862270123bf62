"""Run Dagster's daemon with a sensor polling interval below Dagster's default of 5 seconds.

``python -m rft_platform.jobs.daemon run -w workspace.yaml`` takes the options of ``dagster-daemon``. Only one daemon
can run per home. A plain ``dagster-daemon`` works too, but its sensors tick every 5 seconds at best. After the system
clock was set back, its sensors also wait until the clock reaches the time of their last tick.
"""

import sys

from rft_platform.common.errors import RftError, UserError
from rft_platform.common.processes.gc_control import keep_imports
from rft_platform.common.processes.parent import end_with_supervisor
from rft_platform.config.home import Home
from rft_platform.jobs.dagster_internals.daemon_patches import patch_daemon, run_dagster_daemon
from rft_platform.jobs.instance import end_stranded_launches, open_instance
from rft_platform.jobs.sensor_interval import sensor_interval_s
from rft_platform.jobs.singleton_lock import singleton_lock


def main() -> None:
    """Run the daemon until it is interrupted; exit code 2 if another daemon serves this home."""
    end_with_supervisor()
    keep_imports()
    home = Home.from_environment()
    try:
        with singleton_lock(home.leases / "daemon.lock", f"the daemon of {home.root}"):
            patch_daemon(sensor_interval_s())
            with open_instance(home) as instance:
                end_stranded_launches(instance)
            run_dagster_daemon()
    except RftError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UserError) else 1) from None


if __name__ == "__main__":
    main()
