"""An S3 server on loopback (moto), and the variables with which clients of this process use it."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def s3_server() -> Iterator[str]:
    """The server's URL."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def s3_variables(endpoint: str) -> dict[str, str]:
    """The environment of clients of the server at ``endpoint``, with keys that no other server accepts."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def make_bucket(endpoint: str, name: str) -> str:
    """The URL of a project in a new bucket."""
    import boto3
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()  # an instance keeps the address with which it was made
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket=name)
    return f"s3://{name}/project"
