"""Start or continue a project: check its configuration, print the notices, then write the configuration."""

from rft_platform.config.home import Home
from rft_platform.config.plan import RunPlan
from rft_platform.config.schema import RftConfig
from rft_platform.driving.console import notes
from rft_platform.driving.preflight import check_run
from rft_platform.driving.starting import put_in_force


def begin(home: Home, config: RftConfig) -> RunPlan:
    """Check a configuration and write it to the project's folder; returns its plan.

    Raises UserError, with nothing written, if it cannot be run.
    """
    plan = check_run(home, config)
    for notice in plan.notices:
        notes().print(f"note: {notice}", markup=False, soft_wrap=True)
    put_in_force(home, config)
    return plan
