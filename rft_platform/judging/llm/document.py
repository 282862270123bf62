"""Extract the JSON object from a model's answer."""

import json
import re
from typing import Any

from rft_platform.judging.llm.asking import InvalidAnswerError

_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_START = re.compile(r'\{(?=\s*["}])')
_DECODER = json.JSONDecoder()
#: The object is searched in this many characters at the end of an answer, which bounds the time.
LONGEST_OBJECT = 1 << 15


def last_object(text: str) -> dict[str, Any]:
    """Return the last JSON object in a text, which may have reasoning, words or a fence around it.

    Raises InvalidAnswerError if there is none, and for JSON that is nested too deep for Python.
    """
    text, found, position = _without_thoughts(text)[-LONGEST_OBJECT:], None, 0
    while (start := _START.search(text, position)) is not None:
        try:
            found, position = _DECODER.raw_decode(text, start.start())
        except ValueError:
            position = start.end()
        except RecursionError:
            raise InvalidAnswerError("its JSON is nested too deep") from None
    if found is None:
        raise InvalidAnswerError("it holds no JSON object")
    return found


def _without_thoughts(text: str) -> str:
    kept, position = [], 0
    while (start := text.find(_THOUGHT, position)) >= 0 and (end := text.find(_THOUGHT_END, start)) >= 0:
        kept.append(text[position:start])
        position = end + len(_THOUGHT_END)
    return "".join([*kept, text[position:]])
