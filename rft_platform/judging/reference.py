"""The reference answer of a task."""

from typing import Any

from rft_platform.judging.text import response_text


def reference_text(task: dict[str, Any], answer_key: str) -> str:
    """Text of the task's answer column. Raises KeyError if there is no such column, ValueError if it is empty."""
    if answer_key not in task:
        raise KeyError(f"the task has no column {answer_key!r}; its columns are {', '.join(task)}")
    text = response_text(task[answer_key])
    if not text.strip():
        raise ValueError(f"the task's reference answer (column {answer_key!r}) is empty")
    return text
