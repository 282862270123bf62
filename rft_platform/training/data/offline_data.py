"""Read offline training data from Parquet: demonstrations for SFT, and preference pairs for DPO (arXiv 2305.18290).

Both are conversations (``conversations``). The loss is computed on answers of the assistant.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rft_platform.common.errors import UserError
from rft_platform.tasks.messages import learned, weight_of
from rft_platform.training.data.conversations import Conversation, Turn, json_cells, read_table, tokenise
from rft_platform.training.data.rollout_rows import TrainingRows, digest_files
from rft_platform.training.data.samples import Sample, demonstration_sample

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

    Columns of pairs, all JSON: ``prompt``, ``chosen`` and ``rejected`` (messages), optionally ``tools``. ``chosen`` and
    ``rejected`` end with the answer and differ only in it. A pair is a group of two rows with equal prompt tokens and
    advantages +1 and -1.

    Columns of labelled answers: ``completion`` and ``label`` (true: desirable) in place of ``chosen`` and ``rejected``.
    Each answer is a group of one row with advantage +1 or -1. Raises UserError for a missing column or an empty file.
    """
    digest, table = digest_files([path]), read_table(path)
    columns = set(table.column_names)
    pairs, labelled = {"prompt", "chosen", "rejected"} <= columns, {"prompt", "completion", "label"} <= columns
    if not (pairs or labelled) or not len(table):
        raise UserError(
            f"{path}: {len(table)} rows with the columns {sorted(columns)}; expected rows with prompt, chosen and "
            "rejected, or with prompt, completion and label"
        )
    names = ("chosen", "rejected") if pairs else ("completion",)
    cells = [json_cells(table, name) for name in ("prompt", *names)]
    tools = json_cells(table, "tools") if "tools" in columns else [None] * len(table)
    turns = []
    for row, (offered, prompt, *answers) in enumerate(zip(tools, *cells, strict=True)):
        before = [*prompt, *answers[0][:-1]]  # one object, so that ``tokenise`` renders it once
        turns += [Turn(f"{path}, row {row}", before, answer[-1], offered) for answer in answers]
    row_ids = [f"{row}:{name}" if pairs else str(row) for row in range(len(table)) for name in names]
    samples = [answer_sample(row_id, *ids) for row_id, ids in zip(row_ids, tokenise(turns, model_folder), strict=True)]
    desirable = [True, False] * len(table) if pairs else json_cells(table, "label")
    for sample, is_desirable in zip(samples, desirable, strict=True):
        sample.advantage = CHOSEN if is_desirable else REJECTED
    return TrainingRows(samples, np.arange(len(samples)) // len(names), digest)
