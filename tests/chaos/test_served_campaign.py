"""Kills of the processes of a real ``rft serve``: it comes back, and nothing that it acknowledged is lost."""

from pathlib import Path

import pytest

from chaos.online.served import ServedCampaign


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kills_of_service_engine_trainer_and_daemon_lose_nothing(tmp_path: Path) -> None:
    report = ServedCampaign(tmp_path, 3).run(4)
    assert report["violations"] == []
    assert sum(report["kills"].values()) == 4
    assert report["acknowledged"] > 20
    assert report["collected_rows"] == report["rows"]["consumed"] > 0
