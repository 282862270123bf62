"""Find held-out tasks whose prompts also occur in an offline dataset."""

from typing import TYPE_CHECKING

from rft_platform.rounds.project import Project
from rft_platform.tasks.leaks import normalise

if TYPE_CHECKING:
    from rft_platform.tasks.offline import OfflineDataset
    from rft_platform.tasks.task import Task


def leaked_tasks(project: Project, dataset: "OfflineDataset") -> "list[Task]":
    """The held-out tasks whose whole prompt is a user message of the dataset."""
    held_out = [task for _, tasks in project.eval_tasks for task in tasks.tasks]
    if not held_out:
        return []
    asked = {
        normalise(str(message["content"]))
        for row in dataset.rows
        for message in row.get("messages") or row["prompt"]
        if message["role"] == "user"
    }
    return [task for task in held_out if normalise(task.prompt) in asked]
