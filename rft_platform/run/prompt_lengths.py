"""Compare the prompt lengths of a taskset with the context length, before anything starts.

Tokens are counted with the model folder's ``tokenizer.json``, which loads in milliseconds. The chat template adds
tokens to each prompt, and very long prompts are cut, so the counts are lower bounds. Without ``tokenizer.json``, four
characters count as a token.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import UserError
from rft_platform.common.files import read_json

if TYPE_CHECKING:
    from rft_platform.config.schema.buffer import Taskset
    from rft_platform.rounds.project.project import Project

_COUNTED = 2000  # number of the longest prompts whose tokens are counted, which takes about a second
_TRIED = 50  # number of the shortest prompts that are tried; if these do not fit, no prompt fits
_CHARACTERS_A_TOKEN = 4
_LONGEST_COUNTED = 1_000_000  # characters of a prompt, enough for any context


def check_prompt_lengths(project: "Project", taskset: "Taskset") -> None:
    """Raise UserError if no prompt of a taskset leaves space for an answer; estimated counts never raise.

    A taskset with a user workflow is skipped, because the workflow builds its own prompts.
    """
    context, tokenizer = context_of(project), _tokenizer(project)
    if context is None or tokenizer is None or ":" in taskset.workflow:
        return
    counts = token_counts(_shortest_first(project, taskset)[:_TRIED], tokenizer)
    if min(counts) >= context:
        raise UserError(
            f"{taskset.path}: no prompt fits: the shortest have {min(counts):,} tokens, and the context is {context:,} "
            "(model.max_model_len, or the model's own limit): raise it, or give shorter tasks"
        )


def task_lines(project: "Project") -> Iterator[str]:
    """Lines of the plan about each taskset: rows, tasks, the longest prompt, and how many prompts are too long."""
    from rft_platform.rounds.project.project import load_taskset

    inputs, context, tokenizer = project.config.buffer.explorer_input, context_of(project), _tokenizer(project)
    for taskset in inputs.every.values():
        dataset = load_taskset(taskset)
        limited = "" if taskset.limit is None else f" (limit {taskset.limit:,})"
        counts = token_counts(_shortest_first(project, taskset)[-_COUNTED:], tokenizer)
        about = "" if tokenizer is not None else "about "
        line = (
            f"read       {dataset.report.source}: {dataset.report.rows:,} rows, {len(dataset.tasks):,} tasks{limited}; "
            f"longest prompt {about}{max(counts):,} tokens"
        )
        if ":" in taskset.workflow:
            line += " without what the workflow adds (system prompt, tools)"
        if context is not None:
            line += f" in a context of {context:,}"
            too_long = sum(count >= context for count in counts)
            line += f", {too_long:,} prompts are too long" if too_long else ""
        yield line


def context_of(project: "Project") -> int | None:
    """Maximum tokens of prompt and answer: the smaller of the configured and the model's limit; None if unknown."""
    model = project.config.model
    limits = [model.max_model_len, model_limit(Path(model.model_path))]
    return min((limit for limit in limits if limit), default=None)


def model_limit(folder: Path) -> int | None:
    """The longest sequence that the model's ``config.json`` allows; None if it is unknown."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        config = read_json(file)
        own = (config.get("text_config") or config).get("max_position_embeddings")
    except (ValueError, AttributeError):
        return None  # the check of the model's folder reports the error
    return own if isinstance(own, int) and own > 0 else None


def token_counts(prompts: Sequence[str], tokenizer: Any | None) -> list[int]:
    """Tokens of each prompt, at least 1; estimated without a ``tokenizer``."""
    if tokenizer is None:
        return [max(1, len(prompt) // _CHARACTERS_A_TOKEN) for prompt in prompts]
    texts = [prompt[:_LONGEST_COUNTED] for prompt in prompts]
    return [max(1, len(found.ids)) for found in tokenizer.encode_batch(texts, add_special_tokens=False)]


def _shortest_first(project: "Project", taskset: "Taskset") -> list[str]:
    from rft_platform.rounds.project.project import load_taskset

    system = taskset.format.system_prompt or ""
    return sorted((system + task.prompt for task in load_taskset(taskset).tasks), key=len)


def _tokenizer(project: "Project") -> Any | None:
    """The tokenizer in the model's folder; None if there is no ``tokenizer.json`` that can be read."""
    file = Path(project.config.model.model_path) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises plain Exception; the engine reports the error
        return None
