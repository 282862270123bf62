"""Record the cost of every drive (one run of the driver): wall time, CPU time, and the time of each launch."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rft_platform.cluster.local.locks import locked
from rft_platform.common.errors import RftError
from rft_platform.common.files import read_json, write_json
from rft_platform.config.home import Home

LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class DriveCost:
    """The cost of one drive, from its start to its end, successful or not."""

    started_at: float  # seconds since the epoch
    wall_s: float = 0.0
    cpu_s: float = 0.0  # of the driver, the engine and the trainer
    launches: list[dict[str, Any]] = field(default_factory=list)  # kind, round, run_id, wall_s


@contextmanager
def recorded_cost(home: Home) -> Iterator[DriveCost]:
    """Measure the block and add its cost to the ledger. Engine and trainer must still run when the block ends."""
    cost = DriveCost(time.time())
    wall, cpu = time.perf_counter(), time.process_time()
    before = home.cluster.processor_seconds()
    try:
        yield cost
    finally:
        cost.wall_s = time.perf_counter() - wall
        cost.cpu_s = time.process_time() - cpu
        for service, seconds in home.cluster.processor_seconds().items():
            cost.cpu_s += max(0.0, seconds - before.get(service, 0.0))  # 0: it has ended
        try:
            with locked(_file(home)):  # the two halves of a project may end together
                write_json(_file(home), [*map(asdict, drive_costs(home)), asdict(cost)])
        except (OSError, RftError) as error:  # bookkeeping must neither fail a run nor hide its error
            LOG.warning("the cost of this run was not recorded: %s", error)


def drive_costs(home: Home) -> list[DriveCost]:
    """All drives so far, oldest first. An unreadable ledger is renamed to ``.damaged`` and does not stop the run."""
    file = _file(home)
    try:
        return [DriveCost(**item) for item in read_json(file)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        LOG.warning("%s cannot be read (%s): the cost of earlier runs is not shown", file, error)
        with suppress(OSError):
            file.replace(file.with_name(f"{file.name}.damaged"))
        return []


def launch_seconds(home: Home) -> dict[int, float]:
    """Wall seconds of all launches of each round; those of the daemon's launches include their wait in the queue."""
    driven = {
        launch["run_id"]: (launch["round"], launch["wall_s"]) for cost in drive_costs(home) for launch in cost.launches
    }
    seconds = defaultdict[int, float](float)
    for number, wall_s in {**_runs_of_dagster(home), **driven}.values():
        seconds[number] += wall_s
    return seconds


def _runs_of_dagster(home: Home) -> dict[str, tuple[int, float]]:
    if not (home.dagster / "dagster.yaml").exists():
        return {}
    from rft_platform.jobs.instance import open_instance
    from rft_platform.jobs.launches import run_seconds

    with open_instance(home, capture_output=False) as instance:
        return run_seconds(instance)


def _file(home: Home) -> Path:
    return home.logs / "drives.json"
