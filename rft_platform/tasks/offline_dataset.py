"""Load the dataset of an offline training: rows become conversations, pairs or labelled answers.

``Columns`` says which columns they are made of. Each has its file and line.
"""

import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.files import digest_file, digest_json
from rft_platform.tasks.dataset import DatasetReport, half_pair, is_empty
from rft_platform.tasks.messages import (
    Message,
    as_context,
    as_messages,
    conversation,
    learned,
    tools_of,
    with_system,
    without_json,
)
from rft_platform.tasks.sources import LocatedRow, located_rows, source_files, with_nested
from rft_platform.tasks.task import ORIGIN

Row = dict[str, Any]  # lists of messages or tools; ``label`` is a boolean

_RESPONSES = ("response", "completion")
_LABELS = {**dict.fromkeys(("true", "1", "1.0"), True), **dict.fromkeys(("false", "0", "0.0"), False)}


@dataclass(frozen=True, slots=True)
class Columns:
    """Column names, from section ``format`` of an experience buffer."""

    prompt_type: str | None = None
    messages: str = "messages"
    tools: str | None = None
    prompt: str = "prompt"
    response: str | None = None
    chosen: str = "chosen"
    rejected: str = "rejected"
    label: str = "label"
    system_prompt: str | None = None

    def names(self) -> list[str]:
        """The names of all columns."""
        named = (self.messages, self.tools, self.prompt, self.response, self.chosen, self.rejected, self.label)
        return [name for name in named if name is not None]

    def check_demonstrations(self, source: str, found: Sequence[str]) -> None:
        """Raise UserError unless ``found`` contains the columns of demonstrations."""
        answers = [self.response] if self.response else list(_RESPONSES)
        pair = self.prompt in found and any(name in found for name in answers)
        whole = self.messages in found
        wanted_pair = f"{self.prompt!r} with {' or '.join(map(repr, answers))}"
        if self.prompt_type == "messages" and not whole:
            raise _missing(source, found, [self.messages], f"{self.messages!r} (prompt_type messages)")
        if self.prompt_type in ("plaintext", "chatpair") and not pair:
            names = [self.prompt, answers[0]]
            raise _missing(source, found, names, f"{wanted_pair} (prompt_type {self.prompt_type})")
        if not whole and not pair:
            names = [self.messages, self.prompt, answers[0]]
            raise _missing(source, found, names, f"{self.messages!r}, or {wanted_pair}")

    def has_labels(self, found: Sequence[str]) -> bool:
        """Whether ``found`` has the columns of answers with a label, and not those of pairs."""
        return self.label in found and not {self.chosen, self.rejected} <= set(found)

    def check_labels(self, source: str, found: Sequence[str]) -> None:
        """Raise UserError unless ``found`` contains the columns of answers with a label."""
        answers = [self.response] if self.response else list(_RESPONSES)
        if self.prompt not in found or not any(name in found for name in answers):
            names = [self.prompt, answers[-1], self.label]
            expected = f"{self.prompt!r} with {' or '.join(map(repr, answers))} and {self.label!r}"
            raise _missing(source, found, names, expected)

    def check_pairs(self, source: str, found: Sequence[str]) -> None:
        """Raise UserError unless ``found`` contains the columns of preference pairs."""
        names = [self.prompt, self.chosen, self.rejected]
        if not {self.chosen, self.rejected} <= set(found):
            labelled = f"; or for kto {self.prompt!r}, {self.response or 'completion'!r}, {self.label!r}"
            raise _missing(source, found, names, f"{', '.join(map(repr, names))}{labelled}")
        if self.prompt_type in ("plaintext", "chatpair") and self.prompt not in found:
            expected = f"{', '.join(map(repr, names))} (prompt_type {self.prompt_type})"
            raise _missing(source, found, names, expected)


def conversation_of(columns: Columns, raw: dict[str, Any], where: str) -> Row | None:
    """A row of demonstrations as ``messages`` and optionally ``tools``; None if prompt or answer is empty.

    If the prompt is a conversation, its assistant messages are context: only the response is learned. Raises UserError
    with a message that begins with ``where``.
    """
    if columns.prompt_type in (None, "messages") and columns.messages in raw:
        if is_empty(raw[columns.messages]):
            return None
        messages = conversation(raw[columns.messages], f"{where}, {columns.messages}")
        if not learned(messages):
            raise UserError(f"{where}, {columns.messages}: no assistant message to learn from")
    else:
        parts = _prompt_and_answer(columns, raw, where)
        if parts is None:
            return None
        messages = [*as_context(parts[0]), *parts[1]]
    return _row(columns, raw, where, messages=with_system(messages, columns.system_prompt))


def labelled_of(columns: Columns, raw: dict[str, Any], where: str) -> Row | None:
    """A labelled answer as ``prompt``, ``completion``, ``label`` and optionally ``tools``; None if one is empty.

    Raises UserError with a message that begins with ``where``.
    """
    parts, label = _prompt_and_answer(columns, raw, where), raw.get(columns.label)
    if parts is None or is_empty(label):
        return None
    known = _LABELS.get(str(label).strip().lower())
    if known is None:
        raise UserError(
            f"{where}, {columns.label}: {label!r}; expected true or 1 for a desirable answer, false or 0 for another"
        )
    prompt, answer = with_system(parts[0], columns.system_prompt), parts[1]
    return {**_row(columns, raw, where, prompt=prompt, completion=answer), "label": known}


def _prompt_and_answer(columns: Columns, raw: dict[str, Any], where: str) -> tuple[list[Message], list[Message]] | None:
    """The prompt and its one answer; None if one of them is empty."""
    name = columns.response or next((name for name in _RESPONSES if name in raw), _RESPONSES[0])
    prompt, response = raw.get(columns.prompt), raw.get(name)
    if is_empty(prompt) or is_empty(response):
        return None
    answer = _answer(columns, response, f"{where}, {name}")
    return _prompt(columns, prompt, where), answer


def pair_of(columns: Columns, raw: dict[str, Any], where: str) -> Row | None:
    """A row of pairs as ``prompt``, ``chosen``, ``rejected`` and optionally ``tools``; None if one of them is empty.

    Raises UserError with a message that begins with ``where``.
    """
    chosen, rejected = raw.get(columns.chosen), raw.get(columns.rejected)
    if is_empty(chosen) or is_empty(rejected):
        return None
    if columns.prompt_type is None:
        chosen, rejected = without_json(chosen), without_json(rejected)
    if _are_whole(columns, chosen, rejected):
        prompt, better, worse = _shared_prompt(columns, chosen, rejected, where)
    else:
        if is_empty(raw.get(columns.prompt)):
            return None
        prompt = _prompt(columns, raw[columns.prompt], where)
        better = _answer(columns, chosen, f"{where}, {columns.chosen}")
        worse = _answer(columns, rejected, f"{where}, {columns.rejected}")
    if better[:-1] != worse[:-1]:
        raise UserError(f"{where}: {columns.chosen} and {columns.rejected} differ before their last message")
    prompt = with_system(prompt, columns.system_prompt)
    return _row(columns, raw, where, prompt=prompt, chosen=better, rejected=worse)


def _prompt(columns: Columns, value: Any, where: str) -> list[Message]:
    place = f"{where}, {columns.prompt}"
    messages = as_messages(value, "user", place, prompt_type=columns.prompt_type)
    if messages[-1]["role"] == "assistant":
        raise UserError(f"{place}: ends with an assistant message; expected a message of the user or of a tool")
    return messages


def _answer(columns: Columns, value: Any, where: str) -> list[Message]:
    return _only_answer(as_messages(value, "assistant", where, prompt_type=columns.prompt_type), where)


def _only_answer(messages: list[Message], where: str) -> list[Message]:
    if messages[0]["role"] != "assistant" or messages[-1]["role"] != "assistant":
        raise UserError(f"{where}: begins or ends with a role other than assistant; expected only the answer")
    return messages


def _are_whole(columns: Columns, chosen: Any, rejected: Any) -> bool:
    """Whether both answers are conversations that include their prompt."""
    if columns.prompt_type in ("plaintext", "chatpair"):
        return False
    return all(
        isinstance(value, list) and value and isinstance(value[0], dict) and value[0].get("role") != "assistant"
        for value in (chosen, rejected)
    )


def _shared_prompt(
    columns: Columns, chosen: Any, rejected: Any, where: str
) -> tuple[list[Message], list[Message], list[Message]]:
    at_left, at_right = f"{where}, {columns.chosen}", f"{where}, {columns.rejected}"
    left, right = conversation(chosen, at_left), conversation(rejected, at_right)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))))
    while shared and left[shared - 1]["role"] == "assistant":  # a shared answer is not part of the prompt
        shared -= 1
    if not shared or shared in (len(left), len(right)):
        raise UserError(
            f"{where}: {columns.chosen} and {columns.rejected} are conversations; they must start with the "
            "same prompt and each continue with an answer"
        )
    return left[:shared], _only_answer(left[shared:], at_left), _only_answer(right[shared:], at_right)


def _row(columns: Columns, raw: dict[str, Any], where: str, **parts: list[Message]) -> Row:
    name = columns.tools or "tools"
    tools = tools_of(raw.get(name), f"{where}, {name}")
    return parts if tools is None else {**parts, "tools": tools}


def _missing(source: str, found: Sequence[str], names: Sequence[str], expected: str) -> UserError:
    near = {name: difflib.get_close_matches(name, found, n=1, cutoff=0.6) for name in names if name not in found}
    hints = [f"{similar[0]!r} for {name!r}" for name, similar in near.items() if similar]
    suggestion = f"; did you mean {', '.join(hints)}?" if hints else ""
    return UserError(
        f"{source}: its columns are {', '.join(map(repr, found))}; expected {expected}{suggestion} (name them in "
        "buffer.trainer_input.experience_buffer.format)"
    )


#: Makes the row to train on from a row of the dataset and its location; None: prompt or answer is empty.
_Maker = Callable[[dict[str, Any], str], Row | None]


@dataclass(frozen=True, slots=True)
class OfflineDataset:
    """The rows in file order, their locations, and the digest of their content and order."""

    rows: tuple[Row, ...]  # messages; prompt, chosen and rejected; or prompt, completion and label; optionally tools
    places: tuple[tuple[str, int], ...]  # file and line (or row number) of each row
    digest: str
    report: DatasetReport
    files: dict[str, str]  # SHA-256 of each source file; empty for a dataset of the hub
    origins: tuple[Any, ...]  # of each row: the traces that it was imported from, or None


def load_conversations(
    path: str, columns: Columns, *, split: str = "train", subset_name: str | None = None, limit: int | None = None
) -> OfflineDataset:
    """Load demonstrations: rows with ``messages``, or with a prompt and a response, in the named columns.

    Raises UserError naming the columns found and expected, or the malformed row.
    """

    def choose(found: tuple[str, ...]) -> _Maker:
        columns.check_demonstrations(path, found)
        return partial(conversation_of, columns)

    return _load(path, split, subset_name, limit, columns, choose)


def load_pairs(
    path: str, columns: Columns, *, split: str = "train", subset_name: str | None = None, limit: int | None = None
) -> OfflineDataset:
    """Load preference pairs: rows with a prompt and its chosen and rejected answers, in the named columns.

    Without a prompt column, chosen and rejected are whole conversations with the same beginning. Rows with a label
    instead have a prompt and one answer, which is desirable or not. Raises UserError as ``load_conversations`` does.
    """

    def choose(found: tuple[str, ...]) -> _Maker:
        labelled = columns.has_labels(found)
        (columns.check_labels if labelled else columns.check_pairs)(path, found)
        return partial(labelled_of if labelled else pair_of, columns)

    return _load(path, split, subset_name, limit, columns, choose)


def _load(
    path: str,
    split: str,
    subset_name: str | None,
    limit: int | None,
    columns: Columns,
    choose: Callable[[tuple[str, ...]], _Maker],
) -> OfflineDataset:
    located = [
        (file, number, with_nested(row, columns.names()))
        for file, number, row in located_rows(path, split, subset_name)
    ]
    if not located:
        raise UserError(f"{path}: the dataset is empty; expected at least one row")
    found = tuple(dict.fromkeys(name for _, _, row in located for name in row))
    report = DatasetReport(path, found)
    kept = list(islice(_kept(located, choose(found), report), limit))
    if not kept:
        raise UserError(f"{path}: none of its {len(located):,} rows can be trained on: {report.examples()}")
    digest = hashlib.sha256()
    for _, row, _ in kept:
        digest.update(digest_json(row).encode())
    return OfflineDataset(
        rows=tuple(row for _, row, _ in kept),
        places=tuple(place for place, _, _ in kept),
        origins=tuple(origin for _, _, origin in kept),
        digest=digest.hexdigest(),
        report=report,
        files=_digests(source_files(path, split, subset_name)),
    )


def _kept(
    located: Iterable[LocatedRow], make: _Maker, report: DatasetReport
) -> Iterator[tuple[tuple[str, int], Row, Any]]:
    """The rows to train on, each with its location and its traces; ``report`` counts all."""
    seen: set[bytes] = set()
    for file, number, raw in located:
        report.rows += 1
        where = f"{file}:{number}"
        row = make(raw, where)
        if row is None:
            report.drop("empty", where)
        elif "chosen" in row and row["chosen"] == row["rejected"]:
            report.drop("undecided (chosen equals rejected)", where)
        elif (identity := _identity(row, where)) in seen:
            report.drop("duplicate", where)
        else:
            seen.add(identity)
            yield (file, number), row, raw.get(ORIGIN)


def _identity(row: Row, where: str) -> bytes:
    try:
        return hashlib.sha256(json.dumps(row, sort_keys=True, ensure_ascii=False).encode()).digest()
    except UnicodeEncodeError as error:
        raise half_pair(where, error) from None


def _digests(files: Iterable[Path]) -> dict[str, str]:
    return {file.name: digest_file(file) for file in files}
