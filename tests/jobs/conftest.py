"""A project to plan for."""

import pytest
import yaml

from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.rounds.project.project import Project


@pytest.fixture
def project(tmp_path) -> Project:
    """A started project of two rounds; nothing has run yet."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "1+1=", "answer": "2"}\n{"question": "1+2=", "answer": "3"}\n')
    config = {
        "model": {"model_path": "unused"},
        "algorithm": {"repeat_times": 2},
        "buffer": {"batch_size": 2, "total_steps": 2, "explorer_input": {"taskset": {"path": str(tasks)}}},
    }
    home = Home(tmp_path / "home")
    write_text(home.config_file, yaml.safe_dump(config))
    return Project.open(home)
