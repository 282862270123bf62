"""Preferences of people: a person sees two answers to the same messages and picks the better one; DPO uses the pairs.

Ratings of single answers, which come with the feedback, are the answers with a label of KTO.

A pair consists of two choices of one request, or of answers to equal messages by any two versions. A hash decides
which answer is shown on the left, so that the habit of picking one side favours no version.
"""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from sqlalchemy import Engine, ForeignKey, Index, String, func, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from rft_platform.common.errors import UserError
from rft_platform.common.personal_data import Redaction
from rft_platform.online.traffic.database import NUMBER, Base, Call, readings, transactions

Picked = Literal["left", "right", "tie", "skip"]
PICKED: tuple[Picked, ...] = ("left", "right", "tie", "skip")
_NEWEST = 300  # calls that are searched for pairs


class Preference(Base):
    """The answer that a person picked. ``skip``: the pair is not shown again and is not trained on."""

    __tablename__ = "preferences"
    __table_args__ = (Index("preferences_pair", "left_call", "right_call", unique=True),)

    number: Mapped[int] = mapped_column(NUMBER, primary_key=True, autoincrement=True)
    at: Mapped[float]
    left_call: Mapped[int] = mapped_column(NUMBER, ForeignKey("calls.number"))
    right_call: Mapped[int] = mapped_column(NUMBER, ForeignKey("calls.number"))
    picked: Mapped[str] = mapped_column(String(8))
    comment: Mapped[str | None]
    rater: Mapped[str | None] = mapped_column(String(200))


@dataclass(frozen=True, slots=True)
class Pair:
    """Two different answers to the same messages."""

    left: int  # numbers of the calls
    right: int
    messages: list[dict[str, str]]  # role and text
    left_text: str
    right_text: str


class PreferenceStore:
    """The queue of pairs and the stored preferences, in the database of the traffic."""

    def __init__(self, engine: Engine, redaction: Redaction | None = None) -> None:
        """Comments pass through ``redaction`` before they are stored."""
        self._transaction, self._reading = transactions(engine), readings(engine)
        self._redaction = redaction or Redaction()

    def next_pair(self, tenant: str = "") -> Pair | None:
        """The newest pair without a preference, of this tenant's calls ("": of all calls)."""
        with self._reading() as session:
            known = {frozenset(row) for row in session.execute(select(Preference.left_call, Preference.right_call))}
            return next(
                (
                    _shown(one, other)
                    for one, other in _pairs(session, tenant)
                    if {one.number, other.number} not in known
                ),
                None,
            )

    def pick(
        self, left: int, right: int, picked: str, comment: str | None = None, rater: str | None = None, tenant: str = ""
    ) -> None:
        """Store what a person picked; a later pick of the same pair replaces it. UserError if the calls are no pair."""
        if picked not in PICKED:
            raise UserError(f"picked {picked!r}: expected one of {', '.join(PICKED)}")
        comment = self._redaction.text(comment)
        with self._transaction() as session:
            calls = [session.get(Call, number) for number in (left, right)]
            one, other = calls
            if (
                one is None
                or other is None
                or not _is_pair(one, other)
                or {one.tenant, other.tenant} - {tenant or one.tenant}
            ):
                raise UserError(f"calls {left} and {right} are not two different answers to the same messages")
            query = select(Preference).where(Preference.left_call == left, Preference.right_call == right)
            found = session.scalar(query) or Preference(left_call=left, right_call=right)
            found.at, found.picked, found.comment, found.rater = time.time(), picked, comment or None, rater
            session.add(found)

    def decided(self) -> int:
        """Number of preferences, ties included."""
        with self._reading() as session:
            return int(session.scalar(select(func.count()).where(Preference.picked != "skip")) or 0)

    def pairs(self, tenant: str = "") -> list[dict[str, Any]]:
        """Preference pairs for DPO, oldest first, each with prompt, chosen and rejected messages. Ties are left out."""
        query = select(Preference).where(Preference.picked.in_(("left", "right"))).order_by(Preference.number)
        with self._reading() as session:
            return [row for preference in session.scalars(query) for row in _training_pair(session, preference, tenant)]

    def rated_answers(self, threshold: float) -> list[dict[str, Any]]:
        """Rated answers for KTO, oldest first: prompt, completion, and whether the reward reaches ``threshold``."""
        query = select(Call).where(Call.reward.is_not(None)).order_by(Call.number)
        with self._reading() as session:
            return [_rated(call, threshold) for call in session.scalars(query) if call.model_call and _has_text(call)]


def _pairs(session: Session, tenant: str) -> Iterator[tuple[Call, Call]]:
    """Pairs among the newest calls; for equal messages, pairs of different versions come first."""
    query = select(Call).order_by(Call.number.desc()).limit(_NEWEST)
    if tenant:
        query = query.where(Call.tenant == tenant)
    groups: defaultdict[str, list[Call]] = defaultdict(list)
    for call in session.scalars(query):
        if call.model_call:
            groups[_prompt_of(call)].append(call)
    for calls in groups.values():
        pairs = [pair for pair in combinations(calls, 2) if _is_pair(*pair)]
        yield from sorted(pairs, key=lambda pair: pair[0].policy_version == pair[1].policy_version)


def _prompt_of(call: Call) -> str:
    shown = [call.tenant, call.model_call["messages"], call.model_call.get("tools")]
    return json.dumps(shown, sort_keys=True)


def _is_pair(one: Call, other: Call) -> bool:
    if not (one.model_call and other.model_call) or _prompt_of(one) != _prompt_of(other):
        return False
    return _answer(one) != _answer(other) and _has_text(one) and _has_text(other)


def _has_text(call: Call) -> bool:
    """Whether the answer has text or tool calls."""
    answer = _answer(call)
    return bool(answer["content"] or "tool_calls" in answer)


def _answer(call: Call) -> dict[str, Any]:
    """The assistant's message, with the parts that training reads."""
    response = call.model_call["response"]
    kept = {name: response[name] for name in ("content", "tool_calls") if response.get(name)}
    return {"role": "assistant", "content": "", **kept}


def _shown(one: Call, other: Call) -> Pair:
    numbers = sorted((one.number, other.number))
    swapped = hashlib.sha256(f"{numbers[0]}/{numbers[1]}".encode()).digest()[0] % 2 == 1
    left, right = sorted((one, other), key=lambda call: call.number, reverse=swapped)
    messages = [{"role": str(each["role"]), "text": _text(each)} for each in one.model_call["messages"]]
    return Pair(left.number, right.number, messages, _text(_answer(left)), _text(_answer(right)))


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, indent=1)
    calls = message.get("tool_calls")
    return text if not calls else f"{text}\n{json.dumps(calls, ensure_ascii=False, indent=1)}".strip()


def _training_pair(session: Session, preference: Preference, tenant: str) -> Iterator[dict[str, Any]]:
    left, right = (session.get_one(Call, number) for number in (preference.left_call, preference.right_call))
    if not (left.model_call and right.model_call) or (tenant and left.tenant != tenant):
        return  # a call was erased after the person picked
    chosen, rejected = (left, right) if preference.picked == "left" else (right, left)
    row: dict[str, Any] = {
        "prompt": left.model_call["messages"],
        "chosen": [_answer(chosen)],
        "rejected": [_answer(rejected)],
        "chosen_version": chosen.policy_version,
        "rejected_version": rejected.policy_version,
    }
    yield row | _tools(left)


def _rated(call: Call, threshold: float) -> dict[str, Any]:
    assert call.reward is not None, "only rated calls are selected"
    row = {
        "prompt": call.model_call["messages"],
        "completion": [_answer(call)],
        "label": call.reward >= threshold,
        "reward": call.reward,
        "version": call.policy_version,
    }
    return row | _tools(call)


def _tools(call: Call) -> dict[str, Any]:
    tools = call.model_call.get("tools")
    return {"tools": tools} if tools else {}
