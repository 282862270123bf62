"""Kills of the service with customers at work: what it acknowledged stays, and no row is lost, doubled or split."""

from pathlib import Path

import pytest

from chaos.online.campaign import Campaign
from chaos.syscall_faults import build_library


@pytest.mark.slow
def test_seeded_kills_and_a_full_disk_lose_nothing_that_was_acknowledged(tmp_path: Path, tiny_model: Path) -> None:
    campaign = Campaign(tmp_path, tiny_model, 3)
    report = campaign.run(12, 1 if build_library(tmp_path) else 0)
    assert report["violations"] == []
    assert report["acknowledged"] > 20
    assert report["collected_rows"] == report["rows"]["consumed"] > 0
    assert report["failing_calls"] > 0 or build_library(tmp_path) is None
