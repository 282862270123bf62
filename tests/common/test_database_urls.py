"""A database URL whose driver is missing is refused with what to install, without its password."""

import pytest

from rft_platform.common.database_urls import require_driver
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
