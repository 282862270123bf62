"""``python -m rft_platform.jobs.init_dagster_home``: create DAGSTER_HOME and its tables for webserver and daemon.

For installations in which webserver and daemon are separate services; ``rft ui`` creates both itself.
"""

from rft_platform.config.home import Home
from rft_platform.jobs.instance import open_instance
from rft_platform.resources.names import PLAIN_NAMES


def prepare(home: Home) -> None:
    """Write the settings if they do not exist, and create the tables of runs, events and schedules."""
    for folder in (home.logs, home.mlflow / "artifacts"):
        folder.mkdir(parents=True, exist_ok=True)
    with open_instance(home) as instance:
        instance.get_runs_count()
        instance.all_instigator_state()
        instance.get_dynamic_partitions(str(PLAIN_NAMES.rounds.name))


if __name__ == "__main__":
    prepare(Home.from_environment())
