"""Read preference pairs: a prompt with a chosen and a rejected answer (DPO, arXiv 2305.18290)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rft_platform.errors import UserError
from rft_platform.training.conversations import Conversation, Turn, json_cells, message_cells, read_table, tokenise
from rft_platform.training.demonstrations import answer_sample
from rft_platform.training.rows import TrainingRows, digest_files

if TYPE_CHECKING:
    import pyarrow as pa

CHOSEN, REJECTED = 1.0, -1.0  # advantages that mark the rows of a pair


def read_preferences(path: str, model_folder: Path) -> TrainingRows:
    """Read the pairs of a Parquet file, tokenised as the model at ``model_folder`` reads them.

    Columns: ``chosen`` and ``rejected``; optionally ``prompt``, ``system`` (text) and ``tools`` (JSON). ``prompt``,
    ``chosen`` and ``rejected`` are each text, or messages (nested or as JSON); messages of ``chosen`` and ``rejected``
    end with the answer. Without a ``prompt`` both are whole conversations that are equal up to the answer. A pair is a
    group of two rows with equal prompt tokens and advantages +1 and -1. Raises UserError for a missing column, or if a
    conversation does not end with an assistant message.
    """
    digest = digest_files([path])
    turns = [turn for pair in _pairs(path, read_table(path)) for turn in pair]
    if not turns:
        raise UserError(f"{path}: there is no pair in it to learn from")
    samples = []
    for index, (prompt_ids, answer_ids) in enumerate(tokenise(turns, model_folder)):
        sample = answer_sample(f"{index // 2}:{'rejected' if index % 2 else 'chosen'}", prompt_ids, answer_ids)
        sample.advantage = REJECTED if index % 2 else CHOSEN
        samples.append(sample)
    return TrainingRows(samples, np.arange(len(samples)) // 2, digest)


def _pairs(path: str, table: "pa.Table") -> list[tuple[Turn, Turn]]:
    columns = set(table.column_names)
    if not {"chosen", "rejected"} <= columns:
        raise UserError(f"{path}: columns {sorted(columns)}; expected prompt, chosen and rejected")
    for name in sorted({"prompt", "chosen", "rejected"} & columns):
        if table[name].null_count:
            row = table[name].to_pylist().index(None)
            raise UserError(f"{path}, row {row}: its {name} is empty; every pair needs one")
    nothing = [None] * len(table)
    tools = json_cells(table, "tools") if "tools" in columns else nothing
    system = table["system"].to_pylist() if "system" in columns else nothing
    prompts = message_cells(table, "prompt") if "prompt" in columns else nothing
    chosen, rejected = message_cells(table, "chosen"), message_cells(table, "rejected")
    return [
        _pair(f"{path}, row {row}", *cells)
        for row, cells in enumerate(zip(system, prompts, chosen, rejected, tools, strict=True))
    ]


def _pair(where: str, system: str | None, prompt: Any, chosen: Any, rejected: Any, tools: Any) -> tuple[Turn, Turn]:
    before = _prompt(system, prompt)
    good, bad = _answer(where, "chosen", before, chosen), _answer(where, "rejected", before, rejected)
    if good[:-1] != bad[:-1]:
        raise UserError(f"{where}: chosen and rejected differ before their last message; a pair shares its prompt")
    if not good[:-1]:
        raise UserError(f"{where}: a pair without a prompt; give the column prompt, or whole conversations")
    shared = good[:-1]
    return Turn(where, shared, good[-1], tools), Turn(where, shared, bad[-1], tools)


def _prompt(system: str | None, prompt: str | Conversation | None) -> Conversation:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
    return [{"role": "system", "content": system}, *messages] if system else messages


def _answer(where: str, name: str, before: Conversation, answer: str | Conversation) -> Conversation:
    """Return the conversation up to and including the answer."""
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    whole = answer if before and answer[: len(before)] == before else [*before, *answer]
    if not answer or whole[-1]["role"] != "assistant":
        raise UserError(f"{where}: {name} does not end with an assistant's message; that is what is compared")
    return whole
