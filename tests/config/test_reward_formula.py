"""The formula ``service.train_on``: what it allows, its value, and its check before the start."""

import pytest
from pydantic import ValidationError

from rft_platform.config.schema.reward_formula import PLAIN, RewardFormula
from rft_platform.config.schema.service import Service

METRICS = [{"name": "solved", "type": "boolean"}, {"name": "helpful", "min": 0, "max": 1}]


@pytest.mark.parametrize(
    ("text", "metrics", "value"),
    [
        ("reward", {"reward": 0.5, "other": 1.0}, 0.5),
        ("0.7*solved + 0.3*helpful", {"solved": 1.0, "helpful": 0.5}, 0.85),
        ("(solved - helpful) / 2", {"solved": 1.0, "helpful": 0.5}, 0.25),
        ("-solved + +1", {"solved": 1.0}, 0.0),
        ("solved", {"helpful": 1.0}, None),
        ("1 / helpful", {"helpful": 0.0}, None),
        ("helpful * 1e9 * 1e9", {"helpful": 1e308}, None),
    ],
)
def test_the_value_of_a_formula(text: str, metrics: dict[str, float], value: float | None) -> None:
    assert RewardFormula.parse(text).value(metrics) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    "text",
    [
        "", "0.5", "solved +", "__import__('os').system('true')", "solved.real", "solved[0]", "solved ** 9",
        "'a' * solved", "True * solved", "solved if helpful else 0", "[solved]", "lambda: solved", "solved; helpful",
        "solved and helpful", "solved < 1", "1e400 * solved", "f(solved)", "(solved := 1)", "~solved", "1j * solved",
        "+" * 400 + "solved" * 30, "(" * 240 + "solved" + ")" * 240,
    ],
)  # fmt: skip
def test_other_expressions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="formula"):
        RewardFormula.parse(text)


def test_equal_formulas_are_equal() -> None:
    assert RewardFormula.parse("reward") == PLAIN != RewardFormula.parse("solved")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_on": "solved + speed"}, "names 'speed', which service.metrics does not declare"),
        ({"train_on": "solved +"}, "is no formula"),
        ({"train_on": "speed", "metrics": [{"name": "speed", "min": 0}]}, "names 'speed': give it min and max"),
        (
            {"train_on": "solved", "implicit_feedback": {"base_url": "http://127.0.0.1/v1", "model": "m"}},
            "does not name reward, which service.implicit_feedback gives",
        ),
    ],
)
def test_a_formula_is_checked_before_the_start(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Service.model_validate({"metrics": METRICS, **settings})


def test_declared_metrics_and_the_reward_may_be_in_a_formula() -> None:
    assert Service.model_validate({"metrics": METRICS, "train_on": "0.5*solved + 0.5*reward"}).train_on
    assert Service().train_on == PLAIN.text
