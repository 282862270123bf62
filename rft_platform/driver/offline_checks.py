"""Check an offline training before it starts: its dataset, its models, and whether its length was changed."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.common.errors import UserError
from rft_platform.common.files import read_json

if TYPE_CHECKING:
    from rft_platform.rounds.project.project import Project

_TOKENIZER = "tokenizer_config.json"


def offline_problems(project: "Project") -> Iterator[str]:
    """One line per problem that would make the training fail. Reads the whole dataset."""
    from rft_platform.inference.launch.launcher import check_model_folder
    from rft_platform.rounds.offline import load_dataset

    config = project.config
    try:
        load_dataset(project)
    except UserError as error:
        yield str(error)
    model = Path(config.model.model_path)
    if model.is_dir() and config.model.custom_chat_template is None and not has_chat_template(model):
        yield f"model.model_path {model}: its tokenizer has no chat template, which is needed to render conversations"
    teacher = config.algorithm.teacher_model_path
    if teacher is not None and Path(teacher).is_dir():
        try:
            check_model_folder(Path(teacher))
        except UserError as error:
            yield f"algorithm.teacher_model_path: {error}"
    yield from _length_problems(project)


def offline_notices(project: "Project") -> Iterator[str]:
    """Lines about the dataset's size, rows left out, and held-out tasks that also occur in the dataset."""
    from rft_platform.rounds.offline import leaked_tasks, load_dataset

    dataset = load_dataset(project)
    steps = project.settings.offline_steps(len(dataset.rows))
    yield f"{dataset.report.source}: {len(dataset.rows):,} rows, {steps:,} optimiser steps"
    if said := dataset.report.left_out():
        yield f"{dataset.report.source}: {said}"
    yield from _too_long(project, dataset.report.source)
    leaks = leaked_tasks(project, dataset)
    if leaks:
        held_out = sum(len(tasks.tasks) for _, tasks in project.eval_tasks)
        yield f"{dataset.report.source}: {len(leaks)} of {held_out} held-out tasks occur in it"


def has_chat_template(model: Path) -> bool:
    """Whether the tokenizer in a model folder has a chat template."""
    if any(model.glob("*.jinja")) or (model / "chat_template.json").exists():
        return True
    file = model / _TOKENIZER
    return file.exists() and bool(read_json(file).get("chat_template"))


def _too_long(project: "Project", source: str) -> Iterator[str]:
    """A line about rows that are left out as too long; none before the training has counted them."""
    from rft_platform.rounds.offline import ROUND
    from rft_platform.rounds.project.record import read

    trained = read(project.store, ROUND).trained()
    if trained is not None and (count := int(trained.metrics.get("rows_too_long", 0))):
        yield f"{source}: {count:,} rows longer than max_model_len are dropped"


def _length_problems(project: "Project") -> Iterator[str]:
    """A line if the settings require another number of steps than a finished training made: it cannot be extended."""
    from rft_platform.rounds.offline import ROUND
    from rft_platform.rounds.project.record import read

    record = read(project.store, ROUND)
    trained, dataset = record.trained(), record.dataset
    if trained is None or dataset is None:
        return
    wanted = project.settings.offline_steps(dataset.rows - int(trained.metrics.get("rows_too_long", 0)))
    if trained.steps not in (0, wanted):
        yield (
            f"{project.config.project}/{project.config.name} has trained {trained.steps} steps and its settings "
            f"now require {wanted}: restore the previous values, or start a new run in another RFT_HOME with "
            f"model.model_path models:/{project.model_name}@candidate"
        )
