"""URLs of databases in SQLAlchemy's form: refuse one whose driver is not installed, limit the waits for PostgreSQL."""

from urllib.parse import urlencode

from rft_platform.common.errors import UserError

#: Parameters of PostgreSQL's client library. Without them, a statement waits a quarter of an hour or longer for a
#: server that vanished without closing its connections; with them, at most a minute.
_TIME_LIMITS = {
    "connect_timeout": 10,  # s
    "keepalives_idle": 30,  # s
    "keepalives_interval": 10,  # s
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,  # ms
}
_DRIVERS = ("psycopg2", "psycopg")  # those that use this library


def require_driver(url: str, what: str) -> None:
    """Raise UserError if ``url`` is no database URL, or if the Python package of its driver is missing.

    ``what`` names the setting. The message does not repeat the URL, which may hold a password.
    """
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError

    try:
        dialect = make_url(url).get_dialect()
        dialect.import_dbapi()
    except (ImportError, NoSuchModuleError) as error:
        raise UserError(
            f"{what}: the driver of {url.partition('://')[0]}:// is missing ({error}): pip install "
            "'rft-platform[postgres]' for postgresql+psycopg2://"
        ) from error
    except (ArgumentError, ValueError):
        expected = "sqlite:///FILE or postgresql+psycopg2://USER:PASSWORD@HOST:PORT/NAME"
        raise UserError(f"{what} is not a database URL: expected {expected}") from None


def with_time_limits(url: str) -> str:
    """``url`` with the parameters that limit waits for a PostgreSQL server; those that it sets are kept.

    URLs of other databases and servers, and those that SQLAlchemy does not understand, are returned unchanged.
    """
    if not url.startswith("postgresql"):
        return url
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError

    try:
        parsed = make_url(url)
        if parsed.get_driver_name() not in _DRIVERS:
            return url
    except (ArgumentError, NoSuchModuleError, ValueError):
        return url
    missing = {name: value for name, value in _TIME_LIMITS.items() if name not in parsed.query}
    if not missing:
        return url
    return f"{url.rstrip('?&')}{'&' if parsed.query else '?'}{urlencode(missing)}"
