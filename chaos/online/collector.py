"""The rounds of an online project without training: each collects committed rows and publishes the same weights."""

from collections.abc import Sequence
from pathlib import Path

from rft_platform.common.errors import StorageError
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.online.project import project_in
from rft_platform.rounds.explore import collect
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, publish, published

ROWS = 64  #: of a round


def project_of(home: Path, model: Path) -> Project:
    """The online project in a folder."""
    buffer = {"train_batch_size": ROWS, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}}
    config = {
        "model": {"model_path": str(model), "max_model_len": 64},
        "algorithm": {"algorithm_type": "reinforce++"},
        "buffer": buffer,
    }
    return project_in(Home(home), build_config(config))


def collect_rounds(arguments: Sequence[str]) -> None:
    """Collect round after round until no row is committed; ``arguments``: home and model."""
    home, model = map(Path, arguments)
    project = project_of(home, model)
    number = 0
    while published(project.store, number) is not None:
        number += 1
    if number == 0:
        publish(project.store, Policy("model", 0, "0" * 64, round=0))
        number = 1
    while True:
        try:
            collect(project, number)
        except StorageError as error:
            if "no committed rows" in str(error):
                return
            raise
        publish(project.store, Policy("model", 0, "0" * 64, round=number))
        number += 1
