"""Which project a database of production traffic belongs to: the first project whose service used it."""

import time

from sqlalchemy import Engine, String
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Mapped, mapped_column

from rft_platform.common.errors import UserError
from rft_platform.serving.database import Base, transactions

_ONLY = 1  # number of the only row


class Owner(Base):
    """The owner of the database."""

    __tablename__ = "owner"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    home: Mapped[str] = mapped_column(String(64))  # id of the project's folder; it stays the same when the folder moves
    project: Mapped[str] = mapped_column(String(400))
    since: Mapped[float]


def claim(engine: Engine, home: str, project: str) -> None:
    """Record this project as the database's owner; raises UserError if the database belongs to another project."""
    dialect = postgresql if engine.dialect.name == "postgresql" else sqlite
    row = {"number": _ONLY, "home": home, "project": project[:400], "since": time.time()}
    with transactions(engine)() as session:
        session.connection().execute(dialect.insert(Owner).on_conflict_do_nothing().values(row))
        owner = session.get_one(Owner, _ONLY)
        if owner.home != home:
            raise UserError(
                f"the database of production traffic belongs to another home, that of project {owner.project}: give "
                f"{project} its own database (buffer.trainer_input.experience_buffer.path)"
            )
