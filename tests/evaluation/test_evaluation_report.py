import base64
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from io import BytesIO
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from rft_platform.evaluation.gate import GateDecision
from rft_platform.evaluation.plots import CurvePoint, learning_curve
from rft_platform.evaluation.report import data_uri, markdown_report, write_report
from rft_platform.evaluation.results import EvaluationResult, Transcript
from rft_platform.rounds.evaluate import warn_of_near_passes

CURVE = [
    CurvePoint(1, 8, 0.6, 0.56, 0.64, 0.7, 0.55, 2e-7, 0.5),
    CurvePoint(0, 0, 0.4, 0.36, 0.44, 0.5),
    CurvePoint(2, 16, 1.0, 1.0, 1.0, 1.0, 0.9, 3e-7, 0.1),
]

Make = Callable[..., EvaluationResult]


def test_results_survive_json(make_result: Make) -> None:
    before = make_result(0.5)
    after = TypeAdapter(EvaluationResult).validate_python(json.loads(json.dumps(asdict(before))))
    assert after == before
    assert after.value("sampled_pass_low") == 0.48
    assert after.value("nothing") is None


def test_the_report_compares_with_champion_and_start(make_result: Make) -> None:
    text = markdown_report(
        make_result(0.9, 24),
        title="sums",
        picture="curve.png",
        start=make_result(0.4, 0),
        champion=make_result(0.8, 16),
        decision=GateDecision(True, "better"),
    )
    assert text.startswith("# sums: round 3, policy version 24\n\n**Gate passed:** better\n\n")
    assert "| | this policy (v24) | champion (v16) | start (v0) |".replace("| |", "|  |") in text
    assert "| sampled pass rate (reward >= 1) | **90.0%** (88.0% to 92.0%) | **80.0%** (78.0% to 82.0%) |" in text
    assert "| greedy pass rate (reward >= 1) | – | – | – |" in text
    assert "| sums/reward | 0.9000 | 0.9100 |" in text
    assert "![learning curve](curve.png)" in text
    assert "### Task 0123456789ab: sampled, reward 1, expected `19`\n\n**user**\n```text\n12+7=\n```" in text


def test_a_policy_is_not_compared_with_itself(make_result: Make) -> None:
    text = markdown_report(make_result(0.4, 0), title="sums", start=make_result(0.4, 0), champion=make_result(0.4, 0))
    assert "champion" not in text
    assert "start (" not in text


def test_long_transcripts_are_shortened_and_fences_stay_closed(make_result: Make) -> None:
    call = {"function": {"name": "calculator", "arguments": '{"expression": "1+1"}'}}
    messages = [
        {"role": "user", "content": "x" * 5000 + "the end"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        *({"role": "tool", "content": f"turn {turn}"} for turn in range(20)),
        {"role": "assistant", "content": "```python\n1\n```"},
    ]
    text = markdown_report(make_result(0.5, transcripts=[Transcript("t", "greedy", 0.0, messages)]), title="t")
    assert len(text) < 4000
    assert "the end" in text
    assert '→ calculator({"expression": "1+1"})' in text
    assert "15 messages not shown" in text
    assert "turn 15" in text
    assert "turn 14" not in text
    assert "````text\n```python\n1\n```\n````" in text


def test_the_written_report_shows_the_picture_beside_it(tmp_path: Path) -> None:
    png = learning_curve(CURVE, "sums", champion_round=2)
    path = write_report(tmp_path / "r0002", lambda picture: f"![curve]({picture})", png)
    assert path.read_text() == "![curve](learning_curve.png)"
    assert (path.parent / "learning_curve.png").read_bytes() == png
    assert base64.b64decode(data_uri(png).partition(",")[2]) == png


@pytest.mark.slow
@pytest.mark.parametrize(
    "points", [CURVE, CURVE[1:2], [CurvePoint(0, 0)], [], [CurvePoint(1, 8, 0.5), CurvePoint(9, 72, 0.5)]]
)
def test_a_curve_is_drawn_whatever_was_measured(points: list[CurvePoint]) -> None:
    from PIL import Image

    picture = Image.open(BytesIO(learning_curve(points, "sums", champion_round=2)))
    assert picture.size == (960, 640)
    assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 20
    assert "matplotlib.pyplot" not in sys.modules


def test_many_rewards_just_below_a_pass_are_warned_of(make_result: Make, caplog: pytest.LogCaptureFixture) -> None:
    few = make_result(0.5, 1, scores={"sampled": {"a": [0.95, 0.0, 1.0, 1.05], "b": [0.0, 0.79]}})
    many = make_result(0.5, 1, scores={"sampled": {"a": [0.95, 0.0, 1.0, 1.05]}, "greedy": {"a": [0.8]}})
    warn_of_near_passes([few])
    assert caplog.messages == []
    warn_of_near_passes([few, many])
    (said,) = caplog.messages
    assert said.startswith(
        "40 % of the held-out rewards lie between 0.8 and 1, and a run passes only with a reward of 1"
    )
    assert said.endswith("evaluation: {gate: {metric: mean_reward}}")
