"""Read offline training data from Parquet: demonstrations for SFT, and preference pairs for DPO (arXiv 2305.18290).

Both are conversations (``conversations``). The loss is computed on answers of the assistant.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rft_platform.common.errors import UserError
from rft_platform.tasks.messages import learned, weight_of
from rft_platform.training.data.conversations import Conversation, Turn, json_cells, message_cells, read_table, tokenise
from rft_platform.training.data.rollout_rows import TrainingRows, digest_files
from rft_platform.training.data.samples import Sample, demonstration_sample

if TYPE_CHECKING:
    import pyarrow as pa

CHOSEN, REJECTED = 1.0, -1.0  # advantages that mark the rows of a pair


def read_demonstrations(path: str, model_folder: Path) -> TrainingRows:
    """Read the conversations of a Parquet file, tokenised with the chat template of ``model_folder``.

    Columns: ``messages`` and optionally ``tools`` as JSON, or ``prompt``, ``response`` and optionally ``system`` as
    text. Every assistant message whose ``weight`` is not 0 is one sample. Its prompt is tokenised as at inference,
    because a template may render earlier turns differently once the conversation continues. The weight (default 1)
    scales the loss. The samples of one conversation are one group.

    Raises UserError for a missing column, a conversation without an assistant message or end token, and a weight that
    is not a number >= 0.
    """
    digest = digest_files([path])
    conversations, tools = _read_conversations(path)
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
    """Build a sample in which only the tokens of the answer are trained."""
    mask = np.arange(len(prompt_ids) + len(answer_ids)) >= len(prompt_ids)
    return demonstration_sample(row_id, [*prompt_ids, *answer_ids], mask)


def among_rollouts(rollouts: TrainingRows, experts: TrainingRows, digest: str) -> TrainingRows:
    """Append demonstrations to the rollouts as ``expert`` rows, with renumbered groups. Expert rows have no facts."""
    shown = [replace(sample, row_id=f"expert-{sample.row_id}", expert=True) for sample in experts.samples]
    start = int(rollouts.group.max()) + 1 if len(rollouts.group) else 0
    group = np.concatenate([rollouts.group, experts.group + start])
    return replace(rollouts, samples=[*rollouts.samples, *shown], group=group, digest=digest, too_long=experts.too_long)


def _read_conversations(path: str) -> tuple[list[Conversation], list[list[dict[str, Any]] | None]]:
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


def read_preferences(path: str, model_folder: Path) -> TrainingRows:
    """Read the pairs or the labelled answers of a Parquet file, tokenised with the template of ``model_folder``.

    Columns of pairs: ``chosen`` and ``rejected``; optionally ``prompt``, ``system`` (text) and ``tools`` (JSON).
    ``prompt``, ``chosen`` and ``rejected`` are each text, or messages (nested or as JSON); messages of ``chosen`` and
    ``rejected`` end with the answer. Without a ``prompt``, ``chosen`` and ``rejected`` are whole conversations that
    differ only in the answer. A pair is a group of two rows with equal prompt tokens and advantages +1 and -1.

    Columns of labelled answers: ``prompt``, ``completion`` and ``label`` (true: desirable). Each is a group of one row
    with advantage +1 or -1. Raises UserError for a missing column or value, or if a conversation does not end with an
    assistant message.
    """
    digest, table = digest_files([path]), read_table(path)
    if {"completion", "label"} <= set(table.column_names):
        return _labelled(path, table, model_folder, digest)
    turns = [turn for pair in _pairs(path, table) for turn in pair]
    if not turns:
        raise UserError(f"{path}: it contains no pair to learn from")
    samples = []
    for index, (prompt_ids, answer_ids) in enumerate(tokenise(turns, model_folder)):
        sample = answer_sample(f"{index // 2}:{'rejected' if index % 2 else 'chosen'}", prompt_ids, answer_ids)
        sample.advantage = REJECTED if index % 2 else CHOSEN
        samples.append(sample)
    return TrainingRows(samples, np.arange(len(samples)) // 2, digest)


def _labelled(path: str, table: "pa.Table", model_folder: Path, digest: str) -> TrainingRows:
    cells = _cells(path, table, ("prompt", "completion"))
    labels = json_cells(table, "label")
    turns = []
    for row, (system, prompt, completion, tools) in enumerate(zip(*cells, strict=True)):
        where = f"{path}, row {row}"
        if not isinstance(labels[row], bool):
            raise UserError(f"{where}: label {labels[row]!r}, expected true (desirable) or false")
        before = _pair_prompt(system, prompt)
        *before, answer = _with_answer(where, "completion", before, completion)
        turns.append(Turn(where, before, answer, tools))
    if not turns:
        raise UserError(f"{path}: it contains no answer to learn from")
    samples = [answer_sample(str(row), *ids) for row, ids in enumerate(tokenise(turns, model_folder))]
    for sample, label in zip(samples, labels, strict=True):
        sample.advantage = CHOSEN if label else REJECTED
    return TrainingRows(samples, np.arange(len(samples)), digest)


def _pairs(path: str, table: "pa.Table") -> list[tuple[Turn, Turn]]:
    columns = set(table.column_names)
    if not {"chosen", "rejected"} <= columns:
        raise UserError(
            f"{path}: columns {sorted(columns)}; expected prompt, chosen and rejected, or prompt, completion and label"
        )
    cells = _cells(path, table, ("prompt", "chosen", "rejected"))
    return [_pair(f"{path}, row {row}", *values) for row, values in enumerate(zip(*cells, strict=True))]


def _cells(path: str, table: "pa.Table", names: Sequence[str]) -> list[list[Any]]:
    """Values of the columns ``system``, ``names`` and ``tools``; None in a column that does not exist.

    Raises UserError for a missing value in ``names``.
    """
    columns = set(table.column_names)
    for name in sorted(columns.intersection(names)):
        if table[name].null_count:
            row = table[name].to_pylist().index(None)
            raise UserError(f"{path}, row {row} (from 0): column {name!r} has no value; every row needs a {name}")
    nothing = [None] * len(table)
    system = table["system"].to_pylist() if "system" in columns else nothing
    tools = json_cells(table, "tools") if "tools" in columns else nothing
    return [system, *(list(message_cells(table, name)) if name in columns else nothing for name in names), tools]


def _pair(where: str, system: str | None, prompt: Any, chosen: Any, rejected: Any, tools: Any) -> tuple[Turn, Turn]:
    before = _pair_prompt(system, prompt)
    good, bad = _with_answer(where, "chosen", before, chosen), _with_answer(where, "rejected", before, rejected)
    if good[:-1] != bad[:-1]:
        raise UserError(f"{where}: chosen and rejected differ before their last message; only the last may differ")
    if not good[:-1]:
        raise UserError(f"{where}: a pair without a prompt; add the column prompt, or whole conversations")
    shared = good[:-1]
    return Turn(where, shared, good[-1], tools), Turn(where, shared, bad[-1], tools)


def _pair_prompt(system: str | None, prompt: str | Conversation | None) -> Conversation:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
    return [{"role": "system", "content": system}, *messages] if system else messages


def _with_answer(where: str, name: str, before: Conversation, answer: str | Conversation) -> Conversation:
    """Return the conversation up to and including the answer."""
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    whole = answer if before and answer[: len(before)] == before else [*before, *answer]
    if not answer or whole[-1]["role"] != "assistant":
        raise UserError(f"{where}: {name} does not end with an assistant's message, which the loss compares")
    return whole
