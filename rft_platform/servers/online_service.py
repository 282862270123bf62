"""The online service of the project in ``RFT_HOME``, until SIGTERM: ``python -m rft_platform.servers.online_service``.

``rft serve`` starts this process together with Dagster and MLflow.
"""

import logging
import sys

from rft_platform.cluster.local.service_process import end_with_starter
from rft_platform.cluster.this_process import keep_imports
from rft_platform.common.errors import RftError, UserError
from rft_platform.config.home import Home
from rft_platform.observability.logs import configure
from rft_platform.online.project import open_project
from rft_platform.online.service import serve
from rft_platform.online.traffic.writer import SWITCH_INTERVAL_S
from rft_platform.servers.next_launches import what_is_next

LOG = logging.getLogger(__name__)


def main() -> None:
    """Serve the project of ``RFT_HOME``; exit status 2 for a user's mistake."""
    end_with_starter()
    keep_imports()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    configure("service")
    try:
        serve(open_project(Home.from_environment()), what_is_next)
    except RftError as error:
        LOG.error("%s", error)
        raise SystemExit(2 if isinstance(error, UserError) else 1) from None


if __name__ == "__main__":
    main()
