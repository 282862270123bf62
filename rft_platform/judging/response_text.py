"""Extract the text of a response, whatever type the workflow returned, and of a task's reference answer."""

from typing import Any


def response_text(response: Any) -> str:
    """Return the text of a response: a string, a chat message, a list of content parts, or an object with such content.

    Anything else is converted by ``str``; None is the empty text.
    """
    if response is None:
        return ""
    if isinstance(response, str):
        return response
    if isinstance(response, dict):
        key = next((key for key in ("content", "text") if key in response), None)
        return str(response) if key is None else response_text(response[key])
    if isinstance(response, list | tuple):
        return "\n".join(response_text(part) for part in response)
    content = getattr(response, "content", None)
    return str(response) if content is None else response_text(content)


def reference_text(task: dict[str, Any], answer_key: str) -> str:
    """Text of the task's answer column. Raises KeyError if there is no such column, ValueError if it is empty."""
    if answer_key not in task:
        raise KeyError(f"the task has no column {answer_key!r}; its columns are {', '.join(task)}")
    text = response_text(task[answer_key])
    if not text.strip():
        raise ValueError(f"the task's reference answer (column {answer_key!r}) is empty")
    return text
