"""Dagster's ``Definitions`` of the project in RFT_HOME: the code location that ``workspace.yaml`` names."""

import logging

import dagster as dg

from rft_platform.cluster.this_process import is_multiprocessing_child, keep_imports
from rft_platform.common.errors import RftError
from rft_platform.common.user_code import drop_safe_path
from rft_platform.config.home import Home
from rft_platform.project_definitions import all_definitions, stored_definitions

LOG = logging.getLogger(__name__)


def _of_home() -> dg.Definitions:
    """The definitions of the project in RFT_HOME; all where there is none, or where its file cannot be read."""
    home = Home.from_environment()  # at import: tests in this process set RFT_HOME and the working folder before
    if not home.config_file.exists():
        return all_definitions()
    try:
        return stored_definitions(home)
    except (RftError, OSError) as error:
        LOG.warning("all assets and jobs are shown, because the project's file cannot be used: %s", error)
        return all_definitions()


# The engine and trainer processes do the heavy work. A process for each step would only add seconds to a round.
defs = dg.Definitions.merge(_of_home(), dg.Definitions(executor=dg.in_process_executor))

if is_multiprocessing_child():  # a process of a Dagster run, which has loaded no user code yet
    keep_imports()
    drop_safe_path()
