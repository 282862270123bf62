"""Read demonstrations for supervised fine-tuning: chat-template conversations, with loss on assistant tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rft_platform.errors import UserError
from rft_platform.tasks.messages import learned, weight_of
from rft_platform.training.conversations import Conversation, Turn, json_cells, read_table, tokenise
from rft_platform.training.rows import TrainingRows, digest_files
from rft_platform.training.samples import Sample, demonstration_sample


def read_demonstrations(path: str, model_folder: Path) -> TrainingRows:
    """Read the conversations of a Parquet file, tokenised as the model at ``model_folder`` reads them.

    Columns: ``messages`` and optionally ``tools`` as JSON, or ``prompt``, ``response`` and optionally ``system`` as
    text. Every assistant message whose ``weight`` is not 0 is one sample. Its prompt is tokenised as at inference,
    because a template may render earlier turns differently once the conversation continues. The weight (default 1)
    scales the loss. The samples of one conversation are one group.

    Raises UserError for a missing column, a conversation without an assistant message or end token, and a weight that
    is not a number >= 0.
    """
    digest = digest_files([path])
    conversations, tools = _read(path)
    places = [
        (row, turn)
        for row, conversation in enumerate(conversations)
        for turn in learned(conversation, f"{path}, row {row}")
    ]
    silent = set(range(len(conversations))) - {row for row, _ in places}
    if silent or not conversations:
        where = f"row {min(silent)}" if silent else "the file"
        raise UserError(f"{path}: {where} has no assistant message to learn from")
    turns = [
        Turn(f"{path}, row {row}", conversations[row][:turn], conversations[row][turn], tools[row])
        for row, turn in places
    ]
    samples = [
        replace(answer_sample(f"{row}:{turn}", *ids), weight=weight_of(conversations[row][turn], path))
        for (row, turn), ids in zip(places, tokenise(turns, model_folder), strict=True)
    ]
    return TrainingRows(samples, np.array([row for row, _ in places], np.int64), digest)


def answer_sample(row_id: str, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Sample:
    """Build a sample in which the answer is trained."""
    mask = np.arange(len(prompt_ids) + len(answer_ids)) >= len(prompt_ids)
    return demonstration_sample(row_id, [*prompt_ids, *answer_ids], mask)


def among_rollouts(rollouts: TrainingRows, experts: TrainingRows, digest: str) -> TrainingRows:
    """Append demonstrations as ``expert`` rows to the rollouts and renumber their groups. Expert rows have no facts."""
    shown = [replace(sample, row_id=f"expert-{sample.row_id}", expert=True) for sample in experts.samples]
    start = int(rollouts.group.max()) + 1 if len(rollouts.group) else 0
    group = np.concatenate([rollouts.group, experts.group + start])
    return replace(rollouts, samples=[*rollouts.samples, *shown], group=group, digest=digest, too_long=experts.too_long)


def _read(path: str) -> tuple[list[Conversation], list[list[dict[str, Any]] | None]]:
    table = read_table(path)
    columns = set(table.column_names)
    tools = json_cells(table, "tools") if "tools" in columns else [None] * len(table)
    if "messages" in columns:
        return json_cells(table, "messages"), tools
    if not {"prompt", "response"} <= columns:
        raise UserError(f"{path}: columns {sorted(columns)}; expected messages, or prompt and response")
    system = table["system"].to_pylist() if "system" in columns else [None] * len(table)
    texts = zip(system, table["prompt"].to_pylist(), table["response"].to_pylist(), strict=True)
    return [_conversation(*row) for row in texts], tools


def _conversation(system: str | None, prompt: str, response: str) -> Conversation:
    turns = [("system", system), ("user", prompt), ("assistant", response)]
    return [{"role": role, "content": text} for role, text in turns if role != "system" or text]
