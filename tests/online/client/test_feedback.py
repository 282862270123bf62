"""Feedback bodies: declared metrics, their limits, and what a feedback is about."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from rft_platform.common.errors import UserError
from rft_platform.online.client.feedback import FeedbackForm, FeedbackResult, Metric, Place, UnknownAnswersError

FORM = FeedbackForm([Metric("helpful", min=1, max=5), Metric("correct", level="call", type="boolean")])


def test_each_metric_is_a_body_with_an_id_of_its_own() -> None:
    first, second = FORM.body("a", Place(), reward=0.5, metrics={"helpful": 4}, comment="good", feedback_id="f")
    assert first == {"msg_ids": ["a"], "metric": "reward", "value": 0.5, "comment": "good", "feedback_id": "f"}
    assert second == {"msg_ids": ["a"], "metric": "helpful", "value": 4.0, "feedback_id": "f:helpful"}


def test_answers_are_named_by_themselves_or_their_ids() -> None:
    (body,) = FORM.body([SimpleNamespace(id="a"), "b"], Place("t", "0"), reward=1)
    assert (body["msg_ids"], body["task_id"], body["run_id"]) == (["a", "b"], "t", "0")
    assert FORM.body(SimpleNamespace(id="a"), Place(), reward=1)[0]["msg_ids"] == ["a"]
    event = SimpleNamespace(response=SimpleNamespace(id="resp_a"))
    assert FORM.body(event, Place(), reward=1)[0]["msg_ids"] == ["resp_a"]
    with pytest.raises(TypeError, match="feedback on dict: expected an answer or its id"):
        FORM.body({"id": "a"}, Place(), reward=1)


def test_feedback_can_name_one_choice_of_an_answer() -> None:
    assert FORM.body("a", Place(), reward=1, choice=2)[0]["choice"] == 2
    with pytest.raises(UserError, match="choice is given without answers"):
        FORM.body(None, Place("t", "0"), reward=1, choice=2)


@pytest.mark.parametrize(
    ("answers", "metrics", "says"),
    [
        ("a", {"speed": 1.0}, "not declared"),
        ("a", {"helpful": 6.0}, "outside 1 to 5"),
        ("a", {"helpful": float("nan")}, "is no float"),
        ("a", {"correct": 0.5}, "is no boolean"),
        (None, {"correct": 1.0}, "level call"),
        (None, {"helpful": 1.0}, "needs the answers"),
    ],
)
def test_what_the_metrics_do_not_allow_is_refused(answers, metrics, says) -> None:
    place = Place(conversation_id="c") if says == "level call" else Place()
    with pytest.raises(UserError, match=says):
        FORM.body(answers, place, metrics=metrics)


def test_a_correction_needs_no_value() -> None:
    (body,) = FORM.body("a", Place(), correction="84")
    assert set(body) == {"msg_ids", "correction", "feedback_id"}


def test_feedback_on_unknown_messages_is_an_error() -> None:
    with pytest.raises(UnknownAnswersError, match="a1"):
        FeedbackResult.of({"status": "unknown", "unknown": ["a1"], "matched": 0, "duplicate": 0})


@pytest.mark.slow
def test_the_clients_need_neither_torch_nor_dagster() -> None:
    code = "import rft_platform.online, sys; print({'torch', 'dagster', 'sqlalchemy', 'mlflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
