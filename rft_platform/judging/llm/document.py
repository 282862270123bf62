"""The JSON object in what a model said."""

import json
import re
from typing import Any

from rft_platform.judging.llm.asking import InvalidAnswerError

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_DECODER = json.JSONDecoder()


def last_object(text: str) -> dict[str, Any]:
    """The last JSON object in a text, which may have thoughts, words or a fence around it.

    Raises InvalidAnswerError where there is none.
    """
    text, found, position = _THOUGHT.sub("", text), None, 0
    while (start := text.find("{", position)) >= 0:
        try:
            value, position = _DECODER.raw_decode(text, start)
        except ValueError:
            position = start + 1
            continue
        found = value if isinstance(value, dict) else found
    if found is None:
        raise InvalidAnswerError("it holds no JSON object")
    return found
