"""Fixtures of the chaos tests: a scratch folder that is filled once."""

from pathlib import Path

import pytest

from chaos.scratch import Scratch, make_scratch


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """The folder that scratch projects share."""
    folder: Path = tmp_path_factory.mktemp("chaos")
    return make_scratch(folder)
