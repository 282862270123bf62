"""An S3 server on loopback (moto), with a bucket for each test."""

import itertools
from collections.abc import Iterator

import pytest

from tests.support.s3_server import make_bucket, s3_server, s3_variables

pytest.importorskip("s3fs", reason="make test-s3 installs it")
pytest.importorskip("moto.server", reason="make test-s3 installs it")
_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The server's URL; this process and those that it starts use it."""
    with s3_server() as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in s3_variables(endpoint).items():
            patch.setenv(name, value)
        yield endpoint


@pytest.fixture
def bucket(s3_endpoint: str) -> str:
    """The URL of a new bucket."""
    return make_bucket(s3_endpoint, f"bucket-{next(_NUMBERS)}")
