"""URLs of databases: a missing driver is named without the password, and waits for PostgreSQL are limited."""

import pytest
from sqlalchemy import make_url

from rft_platform.common.database_urls import require_driver, with_time_limits
from rft_platform.common.errors import UserError


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql+asyncpg://u:verysecret@h/d", "driver of postgresql\\+asyncpg"),
        ("nosuch://u:verysecret@h/d", "driver of nosuch"),
        ("verysecret", "is not a database URL"),
    ],
)
def test_a_missing_driver_is_named_and_the_password_is_not(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        require_driver(url, "the URL")
    assert "verysecret" not in str(refusal.value)


def test_the_drivers_of_the_platform_are_there() -> None:
    pytest.importorskip("psycopg2")
    require_driver("postgresql+psycopg2://u@h/d", "the URL")
    require_driver("sqlite:////tmp/file.db", "the URL")


LIMITS = {
    "connect_timeout": "10", "keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}  # fmt: skip


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("postgresql+psycopg2://u:p%40?w@h:5433/d", {}),
        ("postgresql+psycopg2://u@h/d?", {}),
        ("postgresql+psycopg2://u@/d?host=/var/run&port=5433", {"host": "/var/run", "port": "5433"}),
        ("postgresql+psycopg2://u@h/d?connect_timeout=3", {"connect_timeout": "3"}),
        ("postgresql+psycopg://u@h/d", {}),
    ],
)
def test_waits_for_postgresql_are_limited_unless_the_url_limits_them(url: str, own: dict[str, str]) -> None:
    given, limited = make_url(url), make_url(with_time_limits(url))
    assert dict(limited.query) == LIMITS | own
    assert limited.set(query={}) == given.set(query={})
    assert with_time_limits(with_time_limits(url)) == with_time_limits(url)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////tmp/file.db", "mysql+pymysql://u@h/d", "http://mlflow:5000", "postgresql+pg8000://u@h/d",
        "postgresql+psycopg2://u:p@h:x/d", "postgresql nonsense",
    ],
)  # fmt: skip
def test_other_urls_get_no_parameters(url: str) -> None:
    assert with_time_limits(url) == url


def test_the_driver_understands_the_limits() -> None:
    extensions = pytest.importorskip("psycopg2.extensions")
    url = make_url(with_time_limits("postgresql+psycopg2://u@h/d"))
    _, options = url.get_dialect()().create_connect_args(url)
    assert LIMITS.items() <= extensions.parse_dsn(extensions.make_dsn(**options)).items()
