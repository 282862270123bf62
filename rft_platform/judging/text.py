"""Extract the text of a response, in whatever form the workflow returned it."""

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
