"""JSON bodies of feedback and commits. Both SQLite and PostgreSQL can store every body that passes the checks here."""

import math
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from rft_platform.online.gateway.proxy import LONGEST_NAME
from rft_platform.online.traffic.declared_metrics import IMPLICIT, IMPLICIT_ID, REWARD
from rft_platform.online.traffic.store import MOST_IDS

_MOST_CHOICES = 10_000
_MOST_METRICS = 100  # of one feedback
_LONGEST_METRIC = 100  # characters, as in the database
_LONGEST_TEXT = 100_000  # characters of a comment or a correction


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
RunId = Annotated[Name, BeforeValidator(_as_text)]
MetricName = Annotated[str, Field(min_length=1, max_length=_LONGEST_METRIC)]
Text = Annotated[str, Field(max_length=_LONGEST_TEXT)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class StorableBody(BaseModel):
    """A request body that has no NUL, lone surrogate, NaN or infinity: PostgreSQL refuses these in text and JSON."""

    @model_validator(mode="before")
    @classmethod
    def _is_storable(cls, values: Any) -> Any:
        waiting = [values]
        while waiting:
            each = waiting.pop()
            if isinstance(each, dict):
                waiting += [*each, *each.values()]
            elif isinstance(each, list):
                waiting += each
            elif isinstance(each, str) and not _is_storable_text(each):
                raise ValueError(f"the text {each[:50]!r} contains NUL or half of a surrogate pair")
            elif isinstance(each, float) and not math.isfinite(each):
                raise ValueError(f"{each}: expected a finite number")
        return values


def _is_storable_text(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


class UserFeedback(BaseModel):
    """A rating by a person, with a comment."""

    rating: Number | None = None
    comment: Text | None = None


class FeedbackRequest(StorableBody):
    """How well a run did: the ids of its answers and a reward, or the values of other declared metrics.

    ``metric`` with ``value``, ``reward`` and ``metrics`` may all be given, but must not give one metric two values. If
    ``metric`` is given without a value, ``reward`` is its value.
    """

    model_config = ConfigDict(extra="ignore")

    msg_ids: list[Name] | None = Field(default=None, max_length=MOST_IDS)
    choice: int | None = Field(default=None, ge=0, le=_MOST_CHOICES)  # of each answer; None: all choices
    reward: Number | None = None
    task_id: Name | None = None
    run_id: RunId | None = None
    conversation_id: Name | None = None
    feedback_id: Name | None = None
    metric: MetricName = REWARD
    value: Number | None = None
    comment: Text | None = None
    correction: Text | None = None
    tags: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[MetricName, Number] = Field(default_factory=dict, max_length=_MOST_METRICS)
    user_feedback: UserFeedback | None = None

    @model_validator(mode="before")
    @classmethod
    def _spells_msg_ids(cls, values: Any) -> Any:
        """Other unknown keys are ignored, but feedback on answers must not become one on a whole conversation."""
        unknown = [str(key) for key in values if key not in cls.model_fields] if isinstance(values, dict) else []
        if unknown and "msg_ids" not in values and (near := get_close_matches("msg_ids", unknown, n=1)):
            raise ValueError(f"unknown key {near[0]}: did you mean msg_ids?")
        return values

    @field_validator("feedback_id")
    @classmethod
    def _is_not_reserved(cls, value: str | None) -> str | None:
        if value is not None and value.startswith(IMPLICIT_ID):
            raise ValueError(f"ids that begin with {IMPLICIT_ID!r} are reserved for implicit feedback: use another one")
        return value

    @model_validator(mode="after")
    def _names_something(self) -> "FeedbackRequest":
        if self.msg_ids is None and self.conversation_id is None and (self.task_id is None or self.run_id is None):
            raise ValueError(
                "msg_ids is missing: expected the ids of the answers, a conversation_id, or task_id and run_id"
            )
        if self.choice is not None and self.msg_ids is None:
            raise ValueError("choice is given without msg_ids: expected the ids of the answers whose choice is meant")
        if self.msg_ids is not None and not self.msg_ids:
            raise ValueError("msg_ids is empty: expected the ids of the answers that the feedback is about")
        says = (self.reward, self.value, self.comment, self.correction, self.user_feedback, self.metrics or None)
        if all(each is None for each in says):
            raise ValueError("reward is missing: expected a finite number, a value, metrics, a comment or a correction")
        return self

    @model_validator(mode="after")
    def _has_one_value_a_metric(self) -> "FeedbackRequest":
        feedback = (self.value, self.reward, self.comment, self.correction, self.user_feedback)
        if self.metric not in {REWARD, *self.metrics} and all(each is None for each in feedback):
            others = ", ".join(map(repr, self.metrics))
            raise ValueError(
                f"value is missing: expected that of the metric {self.metric!r}, as value or in metrics, which has "
                f"only {others}; leave metric out if {others} is all that was rated"
            )
        if IMPLICIT in {self.metric, *self.metrics}:
            raise ValueError(f"the metric {IMPLICIT!r} is reserved for implicit feedback: use another one")
        for name, value in self._given():
            if value != self.values[name]:
                raise ValueError(f"the metric {name!r} has two values, {self.values[name]:g} and {value:g}")
        return self

    @property
    def values(self) -> dict[str, float]:
        """The value of each metric: first that of ``metric``, then the reward, then the others."""
        return dict(self._given())

    def _given(self) -> list[tuple[str, float]]:
        # ``reward`` is the value of ``metric`` if the report has no other value of it
        metric_of_reward = self.metric if self.value is None and self.metric not in self.metrics else REWARD
        given = [(self.metric, self.value), (metric_of_reward, self.reward), *self.metrics.items()]
        return [(name, value) for name, value in given if value is not None]


class CommitRequest(StorableBody):
    """Which labelled rows to commit; without any field all labelled rows."""

    model_config = ConfigDict(extra="ignore")

    task_id: Name | None = None
    run_id: RunId | None = None
    time_threshold: int | None = Field(default=None, ge=0, lt=2**53)  # milliseconds; rows labelled earlier stay
