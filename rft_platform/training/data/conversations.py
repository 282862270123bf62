"""Read conversations from Parquet and tokenise their answers, for demonstrations and preferences."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.errors import StorageError, UserError
from rft_platform.openai_api.messages import normalised
from rft_platform.openai_api.templates import template_process

if TYPE_CHECKING:
    import pyarrow as pa

RENDERED_AT_ONCE = 256
Conversation = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant's message that answers a conversation."""

    where: str  # file and row, for error messages
    before: Conversation
    answer: dict[str, Any]
    tools: list[dict[str, Any]] | None = None


def read_table(path: str) -> "pa.Table":
    """Read the Parquet file at ``path``. Raises StorageError if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"{path}: cannot be read ({error}): delete the file and create it again") from error


def json_cells(table: "pa.Table", name: str) -> list[Any]:
    """Values of a column of JSON texts (or of nested values); None stays None."""
    return [json.loads(cell) if isinstance(cell, str) else cell for cell in table[name].to_pylist()]


def tokenise(turns: Sequence[Turn], model_folder: Path) -> list[tuple[list[int], list[int]]]:
    """Return prompt and answer ids of every turn, with the chat template and end tokens of ``model_folder``.

    A prompt is tokenised as at inference. Text that the template adds after the answer's last end token is left out,
    because the policy never samples it. Raises UserError if the folder has no chat template, or one that does not fit
    training.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True, trust_remote_code=False)
    if tokenizer.chat_template is None:
        raise UserError(f"model folder {model_folder} has no chat template: conversations cannot be rendered")
    prompts = _prompts(tokenizer, turns)
    wholes = _rendered(tokenizer, turns, [[*turn.before, turn.answer] for turn in turns], prompt=False)
    answers = [_answer(*texts) for texts in zip(turns, prompts, wholes, strict=True)]
    ends = _end_ids(tokenizer, model_folder)
    prompt_ids, answer_ids = _ids(tokenizer, prompts), _ids(tokenizer, answers)
    return [
        (before, _ended(turn, answer, ends)) for turn, before, answer in zip(turns, prompt_ids, answer_ids, strict=True)
    ]


def _prompts(tokenizer: Any, turns: Sequence[Turn]) -> list[str]:
    """Render the prompts. Consecutive turns with the same conversation object (a pair) are rendered once."""
    places: list[int] = []  # index of each turn's prompt among the distinct prompts
    distinct: list[Turn] = []
    for turn in turns:
        if not distinct or turn.before is not distinct[-1].before or turn.tools is not distinct[-1].tools:
            distinct.append(turn)
        places.append(len(distinct) - 1)
    texts = _rendered(tokenizer, distinct, [turn.before for turn in distinct], prompt=True)
    return [texts[place] for place in places]


def _rendered(
    tokenizer: Any, turns: Sequence[Turn], conversations: Sequence[Conversation], *, prompt: bool
) -> list[str]:
    """Render each conversation with the tools of its turn, in batches to reduce the calls to the template process."""
    texts: list[str] = []
    while len(texts) < len(turns):
        start, first = len(texts), turns[len(texts)]
        count = _with_equal_tools(turns[start : start + RENDERED_AT_ONCE])
        messages = [[normalised(message) for message in each] for each in conversations[start : start + count]]
        texts += template_process().render(
            tokenizer.chat_template, messages, first.tools, tokenizer.special_tokens_map, add_generation_prompt=prompt
        )
    return texts


def _with_equal_tools(turns: Sequence[Turn]) -> int:
    """Count how many turns, from the first on, have the same tools as the first turn."""
    return next((place for place, turn in enumerate(turns) if turn.tools != turns[0].tools), len(turns))


def _answer(turn: Turn, prompt: str, whole: str) -> str:
    if not whole.startswith(prompt):
        raise UserError(f"{turn.where}: the chat template changes the text of the prompt when an answer follows it")
    return whole[len(prompt) :]


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of the texts. Repeated texts (the prompt of a pair) are tokenised once."""
    distinct = list(dict.fromkeys(texts))
    ids = dict(zip(distinct, tokenizer(distinct, add_special_tokens=False)["input_ids"], strict=True))
    return [ids[text] for text in texts]


def _end_ids(tokenizer: Any, model_folder: Path) -> set[int]:
    """Ids that end an answer: from the tokenizer and from the generation config."""
    ends = {tokenizer.eos_token_id}
    file = model_folder / "generation_config.json"
    if file.exists():
        end = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        ends |= set(end) if isinstance(end, list) else {end}
    return ends - {None}


def _ended(turn: Turn, answer_ids: list[int], ends: set[int]) -> list[int]:
    last = max((i for i, token in enumerate(answer_ids) if token in ends), default=None)
    if last is None:
        raise UserError(f"{turn.where}: the chat template writes no end token after an answer, which must end")
    return answer_ids[: last + 1]
