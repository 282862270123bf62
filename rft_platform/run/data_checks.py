"""Checks of a project's data before its start: tasks, prompt lengths, workflows, judges, demonstrations, datasets.

Prompt lengths are compared with the context length. Tokens are counted with the model folder's ``tokenizer.json``,
which loads in milliseconds. The chat template adds tokens to each prompt, and very long prompts are cut, so the counts
are lower bounds. Without ``tokenizer.json``, four characters count as a token.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import UserError
from rft_platform.common.files import read_json
from rft_platform.config.checks.notices import unusual_length
from rft_platform.config.findings import Finding, error, note, raised, warning
from rft_platform.config.model_shape import model_folder
from rft_platform.rounds.project.project import Project, load_taskset
from rft_platform.tasks.messages import NOT_JSON

if TYPE_CHECKING:
    from rft_platform.config.schema.buffer import Taskset

_COUNTED = 2000  # number of the longest prompts whose tokens are counted, which takes about a second
_TRIED = 50  # number of the shortest prompts that are tried; if these do not fit, no prompt fits
_CHARACTERS_A_TOKEN = 4
_LONGEST_COUNTED = 1_000_000  # characters of a prompt, enough for any context


def task_problems(project: Project) -> Iterator[Finding]:
    """Tasks that cannot be read or selected, workflows and judges that cannot be loaded, prompts that are too long."""
    from rft_platform.rounds.selection.task_selection import check_selector
    from rft_platform.rounds.setup.taskset_binding import check_judge, check_workflow

    inputs = project.config.buffer.explorer_input
    unread = list(raised(check_selector, project)) if inputs.explored else []  # also reads the tasks
    unread += raised(lambda: project.eval_tasks)
    yield from unread
    for key, taskset in inputs.every.items():
        yield from raised(check_workflow, project, taskset, key=f"{key}.workflow")
        yield from raised(check_judge, project, taskset, key=f"{key}.judge")
        if unread:
            yield from _columns_by_default(project, key, taskset)
        else:
            yield from raised(_check_prompt_lengths, project, taskset, key=f"{key}.path")


def _columns_by_default(project: Project, key: str, taskset: "Taskset") -> Iterator[Finding]:
    """Why a column is expected that a dataset lacks, if its name is another system's default."""
    from rft_platform.tasks.dataset import MissingColumnsError

    lines = [line for line in project.config.notices if line.startswith(f"{key}.format.")]
    try:
        if lines:
            load_taskset(taskset)
    except MissingColumnsError as problem:
        for name in problem.keys:
            yield from (error(line) for line in lines if line.startswith(f"{key}.format.{name} is not set"))
    except UserError:
        return  # another check reports it


def prompt_problems(project: Project) -> Iterator[Finding]:
    """A search for a prompt that cannot run."""
    from rft_platform.rounds.prompt_search import check_prompt_search

    if project.config.prompt_search is not None:
        yield from raised(check_prompt_search, project, key="prompt_search")


def demonstration_findings(project: Project) -> Iterator[Finding]:
    """Demonstrations that cannot be read, and the size of a warm start that has not ended."""
    from rft_platform.rounds.project.record import published
    from rft_platform.rounds.setup.demonstrations import most_steps, read_demonstrations

    settings, experts = project.config.warm_start, project.config.algorithm.experts
    if experts is not None and experts.path is not None and project.settings.spec.expert_weight is not None:
        yield from raised(read_demonstrations, experts, "algorithm.experts", key="algorithm.experts")
    if settings is None or published(project.store, 0) is not None:
        return
    try:
        demonstrations = read_demonstrations(settings)
    except UserError as problem:
        yield error(str(problem), "warm_start")
        return
    rows = len(next(iter(demonstrations.columns.values())))
    goal = "" if settings.stop_at is None else f", until sampled_pass reaches {settings.stop_at:g}"
    yield note(
        f"warm start {settings.path}: {rows:,} rows, {settings.batch_size:,} a step, at most "
        f"{most_steps(settings, rows):,} optimiser steps{goal}",
        key="warm_start",
    )
    if demonstrations.left_out:
        yield warning(f"{settings.path}: {demonstrations.left_out}", key="warm_start")


def dataset_problems(project: Project) -> Iterator[Finding]:
    """Problems that would make an offline training fail. Reads the whole dataset."""
    from rft_platform.inference.launch.launcher import check_model_folder
    from rft_platform.rounds.offline import load_dataset

    config = project.config
    if project.settings.offline is None:
        return
    yield from raised(load_dataset, project)
    model = Path(config.model.model_path)
    if model.is_dir() and config.model.custom_chat_template is None:
        yield from raised(_check_chat_template, model, key="model.model_path")
    teacher = config.algorithm.teacher_model_path
    if teacher is not None and Path(teacher).is_dir():
        for finding in raised(check_model_folder, Path(teacher)):
            yield error(f"algorithm.teacher_model_path: {finding}")
    yield from _changed_length(project)


def dataset_notices(project: Project) -> Iterator[Finding]:
    """Of an offline training: the size of its dataset, rows left out, and held-out tasks that occur in the dataset."""
    from rft_platform.rounds.offline import ROUND, leaked_tasks, load_dataset
    from rft_platform.rounds.project.record import read

    if project.settings.offline is None:
        return
    dataset, trained = load_dataset(project), read(project.store, ROUND).trained()
    source, steps = dataset.report.source, project.settings.offline_steps(len(dataset.rows))
    yield note(f"{source}: {len(dataset.rows):,} rows, {steps:,} optimiser steps")
    if said := dataset.report.left_out():
        yield warning(f"{source}: {said}")
    if trained is not None and (count := int(trained.metrics.get("rows_too_long", 0))):
        yield warning(f"{source}: {count:,} rows longer than max_model_len are dropped")
    if leaks := leaked_tasks(project, dataset):
        held_out = sum(len(tasks.tasks) for _, tasks in project.eval_tasks)
        yield warning(f"{source}: {len(leaks)} of {held_out} held-out tasks occur in it")


def task_notices(project: Project) -> Iterator[Finding]:
    """An unusual length of the run, rows left out of datasets, and held-out tasks that are also explored."""
    from rft_platform.tasks.dataset import find_leaks

    explores = bool(project.config.buffer.explorer_input.explored)
    yield from unusual_length(project.settings, len(project.tasks.tasks) if explores else None)
    explored = list(project.datasets.values()) if explores else []
    held_out = [dataset for _, dataset in project.eval_tasks]
    for dataset in [*explored, *held_out]:
        report = dataset.report
        if said := report.left_out():
            yield warning(f"{report.source}: {said}")
    for taskset, dataset in project.eval_tasks if explored else []:
        if leaks := find_leaks(project.tasks.tasks, dataset.tasks, whole_rows=taskset.reads_rows):
            leaked = f"{len(leaks)} of {len(dataset.tasks)} held-out tasks are also explored"
            yield warning(f"{dataset.report.source}: {leaked}")


def context_notices(project: Project) -> Iterator[Finding]:
    """A ``max_model_len`` above the model's own limit, which then holds."""
    model = project.config.model
    wanted, limit = model.max_model_len, _model_limit(model.model_path)
    if wanted and limit and wanted > limit:
        yield warning(
            f"model.max_model_len {wanted:,} is above max_position_embeddings {limit:,} of {model.model_path}: rows "
            f"end after {limit:,} tokens; lower the first, or raise the second in its config.json"
        )


def regression_notices(project: Project) -> Iterator[Finding]:
    """Too few tasks in the regression set: the interval of an unchanged policy is wider than the tolerance."""
    from rft_platform.evaluation.metrics import paired_share_interval

    settings = project.config.evaluation.regression
    if settings is None or not settings.confident or settings.metric == "mean_reward":
        return
    sizes = {taskset.known_as: len(dataset.tasks) for taskset, dataset in project.eval_tasks}
    unchanged = [0.0] * sizes.get(settings.taskset, 0)
    _, low, _ = paired_share_interval(unchanged, unchanged) if unchanged else (0.0, 0.0, 0.0)
    if low <= -settings.tolerance:
        yield warning(
            f"evaluation.regression: with the {len(unchanged)} tasks of {settings.taskset} the interval of an "
            f"unchanged policy reaches {low:.3f}, below the tolerance of {settings.tolerance:g}: no version is "
            "promoted; take more tasks, a larger tolerance, or confident: false"
        )


def _check_chat_template(model: Path) -> None:
    """Raise UserError unless the tokenizer in a model folder has a chat template."""
    if any(model.glob("*.jinja")) or (model / "chat_template.json").exists():
        return
    file = model / "tokenizer_config.json"
    try:
        settings = read_json(file) if file.exists() else {}
    except NOT_JSON as problem:
        raise UserError(f"{file}: not readable JSON: {problem}; download the model again") from None
    if not isinstance(settings, dict) or not settings.get("chat_template"):
        raise UserError(f"model.model_path {model}: its tokenizer has no chat template, needed to render conversations")


def _changed_length(project: Project) -> Iterator[Finding]:
    """A line if the settings require another number of steps than a finished training made: it cannot be extended."""
    from rft_platform.rounds.offline import ROUND
    from rft_platform.rounds.project.record import read

    record = read(project.store, ROUND)
    trained, dataset = record.trained(), record.dataset
    if trained is None or dataset is None:
        return
    wanted = project.settings.offline_steps(dataset.rows - int(trained.metrics.get("rows_too_long", 0)))
    if trained.steps not in (0, wanted):
        yield error(
            f"{project.config.project}/{project.config.name} has trained {trained.steps} steps and its settings "
            f"now require {wanted}: restore the previous values, or start a new run in another RFT_HOME with "
            f"model.model_path models:/{project.model_name}@candidate"
        )


def _check_prompt_lengths(project: Project, taskset: "Taskset") -> None:
    """Raise UserError if no prompt of a taskset leaves space for an answer; estimated counts never raise.

    A taskset with a user workflow, or without a prompt column, is skipped: the workflow builds the prompts.
    """
    context, tokenizer = _context_of(project), _tokenizer(project)
    if context is None or tokenizer is None or ":" in taskset.workflow or taskset.format.prompt_key is None:
        return
    counts = _token_counts(_shortest_first(project, taskset)[:_TRIED], tokenizer)
    if min(counts) >= context:
        raise UserError(
            f"{taskset.path}: no prompt fits: the shortest have {min(counts):,} tokens, and the context is {context:,} "
            "(model.max_model_len, or the model's own limit): raise it, or give shorter tasks"
        )


def task_lines(project: Project) -> Iterator[str]:
    """Lines of the plan about each taskset: rows, tasks, the longest prompt, and how many prompts are too long.

    Without a prompt column the workflow builds the prompts of the rows, whose lengths say little.
    """
    inputs, context, tokenizer = project.config.buffer.explorer_input, _context_of(project), _tokenizer(project)
    for taskset in inputs.every.values():
        dataset = load_taskset(taskset)
        limited = "" if taskset.limit is None else f" (limit {taskset.limit:,})"
        line = (
            f"read       {dataset.report.source}: {dataset.report.rows:,} rows, {len(dataset.tasks):,} tasks{limited}"
        )
        if taskset.format.prompt_key is None:
            yield line
            continue
        counts = _token_counts(_shortest_first(project, taskset)[-_COUNTED:], tokenizer)
        about = "" if tokenizer is not None else "about "
        line += f"; longest prompt {about}{max(counts):,} tokens without the chat template"
        if ":" in taskset.workflow:
            line += " and what the workflow adds (system prompt, tools)"
        if context is not None:
            line += f" in a context of {context:,}"
            too_long = sum(count >= context for count in counts)
            more = "at least " if too_long == len(counts) < len(dataset.tasks) else ""
            line += f", {more}{too_long:,} prompts are too long" if too_long else ""
        yield line


def _context_of(project: Project) -> int | None:
    """Maximum tokens of prompt and answer: the smaller of the configured and the model's limit; None if unknown."""
    model = project.config.model
    limits = [model.max_model_len, _model_limit(model.model_path)]
    return min((limit for limit in limits if limit), default=None)


def _model_limit(model: str) -> int | None:
    """The longest sequence that the model's ``config.json`` allows; None if it is unknown."""
    folder = model_folder(model)
    if folder is None or not (file := folder / "config.json").is_file():
        return None
    try:
        config = read_json(file)
        own = (config.get("text_config") or config).get("max_position_embeddings")
    except (ValueError, AttributeError):
        return None  # the check of the model's folder reports the error
    return own if isinstance(own, int) and own > 0 else None


def _token_counts(prompts: Sequence[str], tokenizer: Any | None) -> list[int]:
    """Tokens of each prompt, at least 1; estimated without a ``tokenizer``."""
    if tokenizer is None:
        return [max(1, len(prompt) // _CHARACTERS_A_TOKEN) for prompt in prompts]
    texts = [prompt[:_LONGEST_COUNTED] for prompt in prompts]
    return [max(1, len(found.ids)) for found in tokenizer.encode_batch(texts, add_special_tokens=False)]


def _shortest_first(project: Project, taskset: "Taskset") -> list[str]:
    system = taskset.format.system_prompt or ""
    return sorted(((task.system or system) + task.prompt for task in load_taskset(taskset).tasks), key=len)


def _tokenizer(project: Project) -> Any | None:
    """The tokenizer in the model's folder; None if there is no ``tokenizer.json`` that can be read."""
    file = Path(project.config.model.model_path) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises plain Exception; the engine reports the error
        return None
