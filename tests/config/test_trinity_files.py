"""Trinity-RFT's example configurations: each gives a plan, or one line with the reason against it."""

import os
from pathlib import Path

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.dry_run import render_plan
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.run.checks import check_run
from tests.config.trinity_files import with_local_files, write_rows

FOLDER = "data/trinity_configs"
#: Beginnings of file names, and what the reason against a plan says.
REASONS = {
    "RAFT_alfworld": "the environment ALFWorld is no part",
    "grpo_alfworld": "the environment ALFWorld is no part",
    "grpo_webshop": "the environment WebShop is no part",
    "grpo_email_search": "the environment of e-mails is no part",
    "agentscope_websearch": "it needs a search service",
    "agentscope_": "No module named 'agentscope'",  # a plan where AgentScope is installed
    "grpo_vlm": "models and tasks are text here",
    "bench_external_model": "policies of this project",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        folder = Path(os.environ.get("RFT_TEST_DATA", "")) / FOLDER
        names = sorted(file.name for file in folder.glob("*.yaml")) if folder.is_dir() else [""]
        metafunc.parametrize("name", names)


@pytest.mark.slow
def test_a_file_gives_a_plan_or_one_line(
    name: str, test_data: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = test_data / FOLDER / name
    if not source.is_file():
        pytest.skip(f"needs Trinity-RFT's example configurations: {source.parent} is not there")
    rows = write_rows(tmp_path / "rows.jsonl")
    for variable in ("TRINITY_TASKSET_PATH", "TRINITY_SFT_DATASET_PATH"):
        monkeypatch.setenv(variable, str(rows))
    file = with_local_files(source, tmp_path / name, tiny_model, rows)
    reason = next((text for beginning, text in REASONS.items() if name.startswith(beginning)), None)
    try:
        plan = render_plan(check_run(Home(tmp_path / "home"), load_config(file), dry=True))
    except UserError as error:
        (line,) = str(error).splitlines()
        assert reason is not None and reason in line
    else:
        assert reason is None or "agentscope" in reason
        assert "processes" in plan and "order" in plan
    assert not (tmp_path / "home").exists()
