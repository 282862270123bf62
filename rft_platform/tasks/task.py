"""One task of a taskset."""

from dataclasses import dataclass
from typing import Any

#: Column of a dataset that names the traces of other tools that a row was imported from: a list of objects.
ORIGIN = "imported_from"


@dataclass(frozen=True, slots=True)
class Task:
    """A row of a dataset, with its mapped columns.

    ``raw`` is the row as it was read: workflows and judges receive it as the ``task`` dictionary.
    """

    task_id: str  # digest of the row's content: equal rows have equal ids
    taskset: str
    prompt: str
    answer: str | None
    raw: dict[str, Any]
    system: str | None = None  # the row's own system message

    def system_messages(self, default: str | None) -> list[dict[str, Any]]:
        """What a conversation about the task begins with: its own system message, or else ``default``, if any."""
        text = self.system or default
        return [{"role": "system", "content": text}] if text else []
