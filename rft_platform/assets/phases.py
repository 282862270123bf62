"""Where the phase of an asset begins: its log lines get round, run and name, and log files are kept small."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from rft_platform.config.home import Home
from rft_platform.observability.bounded import bound_logs_now_and_then
from rft_platform.observability.logs import phase_context


@contextmanager
def asset_phase(context: dg.AssetExecutionContext, name: str) -> Iterator[None]:
    """The body of asset ``name`` as a phase."""
    bound_logs_now_and_then(Home.from_environment().logs)
    with phase_context(context.partition_key if context.has_partition_key else None, context.run.run_id, name):
        yield
