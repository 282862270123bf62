"""Feedback of a client: declared metrics, request bodies, and the service's answers as dataclasses."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from rft_platform.common.errors import UserError
from rft_platform.online.traffic.declared_metrics import REWARD as REWARD
from rft_platform.online.traffic.declared_metrics import DeclaredMetrics, further_id
from rft_platform.online.traffic.declared_metrics import Metric as Metric


class HasId(Protocol):
    """An answer of the OpenAI API, or a part of a streamed one."""

    id: str


class HasResponse(Protocol):
    """An event of a streamed response that contains the response, such as ``response.completed``."""

    response: Any


Answer: TypeAlias = str | HasId | HasResponse
Answers: TypeAlias = Answer | Sequence[Answer]


class UnknownAnswersError(UserError):
    """The service knows none of the answers that a feedback names: they were not recorded, or the ids are wrong."""

    hint = "check the ids, and whether the service's selection records these calls"


@dataclass(frozen=True, slots=True)
class FeedbackResult:
    """The effect of a feedback, in numbers of answers."""

    matched: int  # answers that this feedback labelled
    duplicate: int  # answers that had this feedback or this reward already
    late: int  # answers that were committed or erased by age before; the feedback is stored and does not label them
    unknown: tuple[str, ...]  # ids that the service does not know

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "FeedbackResult":
        """Read the service's JSON answer; raises UnknownAnswersError if the service knew none of the rated answers."""
        if answer.get("status") == "unknown":
            raise UnknownAnswersError(f"the service knows none of {', '.join(answer['unknown'][:5]) or 'these calls'}")
        return cls(answer["matched"], answer["duplicate"], answer.get("late", 0), tuple(answer["unknown"]))


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The effect of a commit."""

    committed: int  # number of committed rows
    pending_groups: int  # number of tasks that wait for further labelled runs

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "CommitResult":
        """Read the service's JSON answer."""
        return cls(answer["committed"], answer["pending_groups"])


@dataclass(frozen=True, slots=True)
class Place:
    """The run of a task, or the conversation, that a feedback is about if it names no answers."""

    task_id: str | None = None
    run_id: str | None = None
    conversation_id: str | None = None


class FeedbackForm:
    """Builds request bodies for the declared metrics."""

    def __init__(self, metrics: Iterable[Metric] = ()) -> None:
        self._metrics = DeclaredMetrics(metrics)

    def body(
        self,
        answers: Answers | None,
        place: Place,
        *,
        reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
        comment: str | None = None,
        correction: str | None = None,
        tags: Mapping[str, Any] | None = None,
        feedback_id: str | None = None,
        choice: int | None = None,
    ) -> list[dict[str, Any]]:
        """One request body per metric; the first body also has the comment and the correction.

        Raises UserError if a metric is not declared or does not allow its value, or if the feedback names neither
        answers nor a run nor a conversation.
        """
        ids = None if answers is None else ids_of(answers)
        values = ({} if reward is None else {REWARD: reward}) | dict(metrics or {})
        numbers = self._metrics.numbers(values, names_answers=ids is not None)
        about: dict[str, Any] = {
            "msg_ids": ids,
            "choice": choice,
            "task_id": place.task_id,
            "run_id": place.run_id,
            "conversation_id": place.conversation_id,
            "tags": dict(tags or {}) or None,
        }
        if choice is not None and ids is None:
            raise UserError("choice is given without answers: name the answers whose choice is meant")
        if all(about[name] is None for name in ("msg_ids", "conversation_id", "run_id")):
            raise UserError("a feedback needs the answers, the run or the conversation that it is about")
        first = feedback_id or secrets.token_hex(16)
        bodies: list[dict[str, Any]] = [
            {"metric": name, "value": number, "feedback_id": further_id(first, name) if index else first}
            for index, (name, number) in enumerate(numbers.items())
        ] or [{"feedback_id": first}]
        bodies[0] |= {"comment": comment, "correction": correction}
        return [{key: value for key, value in {**about, **body}.items() if value is not None} for body in bodies]


def ids_of(answers: Answers) -> list[str]:
    """The ids of answers; each answer may be given as an object, as an event with its response, or as its id."""
    several = answers if isinstance(answers, Sequence) and not isinstance(answers, str) else [answers]
    return [each if isinstance(each, str) else _id_of(each) for each in several]


def _id_of(answer: Any) -> str:
    found = getattr(answer if hasattr(answer, "id") else getattr(answer, "response", None), "id", None)
    if isinstance(found, str):
        return found
    raise TypeError(
        f"feedback on {type(answer).__name__}: expected an answer or its id, a chunk of a streamed answer, an event of "
        "a streamed response that contains the response (the first and the last do), or a list of these"
    )
