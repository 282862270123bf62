"""Find evaluation tasks that were trained on."""

import unicodedata
from collections.abc import Iterable

from rft_platform.tasks.task import Task


def find_leaks(train: Iterable[Task], evaluation: Iterable[Task]) -> list[Task]:
    """The evaluation tasks whose prompt is also a training prompt.

    The comparison ignores case, white space and Unicode form.
    """
    seen = {normalise(task.prompt) for task in train}
    return [task for task in evaluation if normalise(task.prompt) in seen]


def normalise(prompt: str) -> str:
    """The normalised form in which prompts are compared."""
    return " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())
