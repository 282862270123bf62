"""Start of an asset's phase: log lines get round, run and name, and the size of log files is limited."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg

from rft_platform.config.home import Home
from rft_platform.observability.bounded import bound_logs_now_and_then
from rft_platform.observability.logs import phase_context
from rft_platform.resources.project import ProjectResource


@contextmanager
def asset_phase(context: dg.AssetExecutionContext, name: str, resources: Sequence[Any]) -> Iterator[None]:
    """Run the body of asset ``name``, which has the given resources, as a phase of their project."""
    project = next((each for each in resources if isinstance(each, ProjectResource)), None)
    home = Home.from_environment() if project is None else Home(Path(project.home).absolute())
    bound_logs_now_and_then(home.logs)
    with phase_context(context.partition_key if context.has_partition_key else None, context.run.run_id, name):
        yield
