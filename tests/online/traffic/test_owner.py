"""A database belongs to one project: the service of a second one is refused at its start."""

from pathlib import Path
from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.config.load import build_config
from rft_platform.online.project import project_in
from rft_platform.online.traffic.database import claim, open_database
from rft_platform.online.traffic.project_traffic import home_id
from rft_platform.rounds.project.project import Project
from rft_platform.servers import online_service


def project(folder: Path, url: str) -> Project:
    buffer: dict[str, Any] = {"trainer_input": {"experience_buffer": {"storage_type": "sql", "path": url}}}
    config = {"model": {"model_path": "m", "max_model_len": 64}, "algorithm": {"algorithm_type": "reinforce++"}}
    return project_in(Home(folder), build_config({**config, "project": folder.name, "buffer": buffer}))


def test_the_first_owner_stays(database_url: str) -> None:
    engine = open_database(database_url)
    for _ in range(2):
        claim(engine, "one", "shop/a")
    with pytest.raises(
        UserError, match="belongs to another home, that of project shop/a: give bank/b its own database"
    ):
        claim(engine, "two", "bank/b")


def test_the_service_of_another_home_is_refused_at_its_start(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'traffic.db'}"
    first, second = project(tmp_path / "shop", url), project(tmp_path / "bank", url)
    claim(open_database(url), home_id(first), "shop/a")
    with pytest.raises(UserError, match="shop/a"):
        online_service.serve(second, lambda project: "")


def test_a_moved_home_keeps_its_id(tmp_path: Path) -> None:
    before = home_id(project(tmp_path / "here", "sqlite:///x"))
    (tmp_path / "here").rename(tmp_path / "there")
    assert home_id(project(tmp_path / "there", "sqlite:///x")) == before
    assert home_id(project(tmp_path / "other", "sqlite:///x")) != before
