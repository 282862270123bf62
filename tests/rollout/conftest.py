"""The fake engine, served for one test."""

from collections.abc import Iterator

import pytest

from .fake_engine import FakeEngine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """A fake policy engine that answers over HTTP."""
    fake = FakeEngine()
    fake.serve()
    yield fake
    fake.shutdown()
