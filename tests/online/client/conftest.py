"""A service before the session's engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rft_platform.inference.interface import PolicyEngine
from tests.online.gateway.test_service import Service


@pytest.fixture
def service(policy_engine: PolicyEngine, tmp_path: Path) -> Iterator[Service]:
    service = Service(policy_engine, tmp_path)
    yield service
    service.close()
