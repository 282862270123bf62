"""URLs of databases in SQLAlchemy's form: refuse one whose driver is not installed."""

from rft_platform.common.errors import UserError


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
