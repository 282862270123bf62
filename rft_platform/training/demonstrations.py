"""Demonstrations for supervised fine-tuning: conversations in the chat template, loss on the assistant's tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rft_platform.errors import StorageError, UserError
from rft_platform.training.rows import TrainingRows, digest_files
from rft_platform.training.samples import Sample, demonstration_sample

if TYPE_CHECKING:
    import pyarrow as pa

Conversation = list[dict[str, Any]]


def read_demonstrations(path: str, model_folder: Path) -> TrainingRows:
    """The conversations of a Parquet file, tokenised as the model at ``model_folder`` reads them.

    Columns: ``messages`` and perhaps ``tools`` as JSON, or ``prompt`` and ``response`` and perhaps ``system`` as text.
    Every assistant message is one sample (its prompt is tokenised as at inference, since templates may render earlier
    turns otherwise once the conversation goes on); the samples of one conversation are one group.
    Raises UserError for a missing column, a conversation without an assistant message or end token.
    """
    from transformers import AutoTokenizer

    digest = digest_files([path])
    conversations, tools = _read(path)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    if tokenizer.chat_template is None:
        raise UserError(f"model folder {model_folder} has no chat template: demonstrations cannot be rendered")
    turns = [(row, turn) for row, c in enumerate(conversations) for turn, m in enumerate(c) if m["role"] == "assistant"]
    silent = set(range(len(conversations))) - {row for row, _ in turns}
    if silent or not conversations:
        where = f"row {min(silent)}" if silent else "the file"
        raise UserError(f"{path}: {where} has no assistant message to learn from")
    prompts = _render(tokenizer, [(conversations[row][:turn], tools[row]) for row, turn in turns], prompt=True)
    wholes = _render(tokenizer, [(conversations[row][: turn + 1], tools[row]) for row, turn in turns], prompt=False)
    answers = [_answer(path, row, p, w) for (row, _), p, w in zip(turns, prompts, wholes, strict=True)]
    ends = _end_ids(tokenizer, model_folder)
    samples = [
        _sample(path, row, turn, prompt_ids, answer_ids, ends)
        for (row, turn), prompt_ids, answer_ids in zip(
            turns, _tokenise(tokenizer, prompts), _tokenise(tokenizer, answers), strict=True
        )
    ]
    return TrainingRows(samples, np.array([row for row, _ in turns], np.int64), digest)


def _read(path: str) -> tuple[list[Conversation], list[list[dict[str, Any]] | None]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"{path}: cannot be read ({error}): delete the file and produce it again") from error
    columns = set(table.column_names)
    tools = _json(table, "tools") if "tools" in columns else [None] * len(table)
    if "messages" in columns:
        return _json(table, "messages"), tools
    if not {"prompt", "response"} <= columns:
        raise UserError(f"{path}: columns {sorted(columns)}; expected messages, or prompt and response")
    system = table["system"].to_pylist() if "system" in columns else [None] * len(table)
    texts = zip(system, table["prompt"].to_pylist(), table["response"].to_pylist(), strict=True)
    return [_conversation(*row) for row in texts], tools


def _json(table: "pa.Table", name: str) -> list[Any]:
    return [None if text is None else json.loads(text) for text in table[name].to_pylist()]


def _conversation(system: str | None, prompt: str, response: str) -> Conversation:
    turns = [("system", system), ("user", prompt), ("assistant", response)]
    return [{"role": role, "content": text} for role, text in turns if role != "system" or text]


def _render(
    tokenizer: Any, parts: Sequence[tuple[Conversation, list[dict[str, Any]] | None]], *, prompt: bool
) -> list[str]:
    return [
        tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
        for messages, tools in parts
    ]


def _answer(path: str, row: int, prompt: str, whole: str) -> str:
    if not whole.startswith(prompt):
        raise UserError(f"{path}, row {row}: the chat template renders an answer otherwise than the prompt it follows")
    return whole[len(prompt) :]


def _tokenise(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


def _end_ids(tokenizer: Any, model_folder: Path) -> set[int]:
    """Ids that end an answer: the tokenizer's and those of the generation config."""
    ends = {tokenizer.eos_token_id}
    file = model_folder / "generation_config.json"
    if file.exists():
        given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        ends |= set(given) if isinstance(given, list) else {given}
    return ends - {None}


def _sample(path: str, row: int, turn: int, prompt_ids: list[int], answer_ids: list[int], ends: set[int]) -> Sample:
    """What the template adds after the answer's last end token is never sampled, so it is left out."""
    last = max((i for i, token in enumerate(answer_ids) if token in ends), default=None)
    if last is None:
        raise UserError(f"{path}, row {row}: the chat template ends an answer with no end token: it would never stop")
    answer_ids = answer_ids[: last + 1]
    mask = np.arange(len(prompt_ids) + len(answer_ids)) >= len(prompt_ids)
    return demonstration_sample(f"{row}:{turn}", prompt_ids + answer_ids, mask)
