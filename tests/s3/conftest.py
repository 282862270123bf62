"""An S3 server on loopback (moto), with a bucket for each test."""

import itertools
from collections.abc import Iterator

import pytest

pytest.importorskip("s3fs", reason="make test-s3 installs it")
moto_server = pytest.importorskip("moto.server", reason="make test-s3 installs it")
_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The server's URL; this process and those that it starts use it, with keys that no other server accepts."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_endpoint: str) -> str:
    """The URL of a new bucket."""
    import boto3
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()  # an instance keeps the address with which it was made
    name = f"bucket-{next(_NUMBERS)}"
    boto3.client("s3", endpoint_url=s3_endpoint).create_bucket(Bucket=name)
    return f"s3://{name}/project"
