"""The judge ``reasoning_gym``: the score that the dataset of the package reasoning-gym gives to an answer."""

import re
from typing import Any

from rft_platform.judging.judged_run import response_text
from rft_platform.tasks.enclosed_text import last_enclosed
from rft_platform.tasks.reasoning_gym import COLUMN, score

_OPENING, _CLOSING = re.compile("<answer>"), re.compile("</answer>")


def reasoning_gym(task: dict[str, Any], response: Any) -> float:
    """The dataset's score, 0 to 1, of the text in the last ``<answer>``; without ``<answer>``, of the whole response.

    Raises KeyError if the task is not from a source ``reasoning_gym:NAME``.
    """
    text = response_text(response)
    answer = last_enclosed(text, _OPENING, _CLOSING)
    return score(task[COLUMN], (text if answer is None else answer).strip())
