"""Beginning a project, or going on with it: checked, its notices said, then put in force."""

from rft_platform.config.home import Home
from rft_platform.config.plan import RunPlan
from rft_platform.config.schema import RftConfig
from rft_platform.driving.console import notes
from rft_platform.driving.preflight import check_run
from rft_platform.driving.starting import put_in_force


def begin(home: Home, config: RftConfig) -> RunPlan:
    """Put a configuration in force; UserError, with nothing written, where it cannot be run. Returns its plan."""
    plan = check_run(home, config)
    for notice in plan.notices:
        notes().print(f"note: {notice}", markup=False, soft_wrap=True)
    put_in_force(home, config)
    return plan
