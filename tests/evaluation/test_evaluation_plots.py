"""The learning curve that Dagster shows in the table of an asset's metadata, and that of a search for a prompt."""

from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from rft_platform.evaluation.plots import SHOWN_INLINE, CurvePoint, inline_curve
from rft_platform.evaluation.prompt_plot import PromptCurvePoint, prompt_and_training


def points(count: int) -> list[CurvePoint]:
    return [CurvePoint(number, number, sampled=number / count, greedy=0.5) for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 41, 9999])
def test_the_inline_curve_is_short_enough_to_be_shown_and_is_a_picture(count: int) -> None:
    text = inline_curve(points(count), champion_round=count - 1)
    assert len(text) < SHOWN_INLINE
    address, _, legend = text.partition(")\n\n")
    assert " " not in address.partition("(")[2], "Markdown ends an address at a space"
    picture = ElementTree.fromstring(unquote(address.partition(",")[2]))
    assert [child.tag.rpartition("}")[2] for child in picture] == ["path", "polyline", "polyline", "circle"]
    assert legend.startswith("sampled ") and legend.endswith(f", greedy 50.0% (orange), champion: round {count - 1}")


def test_rounds_that_were_not_evaluated_are_left_out() -> None:
    assert inline_curve([CurvePoint(0, 0), CurvePoint(1, 1)]) == ""
    half = inline_curve([CurvePoint(0, 0, sampled=0.25), CurvePoint(1, 1), CurvePoint(2, 2, sampled=0.75)])
    assert "points='0,49,300,19'" in half and half.endswith("sampled 75.0% (blue)")


def test_a_search_for_a_prompt_is_drawn_beside_the_rounds_that_exist() -> None:
    prompts = [PromptCurvePoint(8, 0.4, 0.3, 0.5, None), PromptCurvePoint(40, 0.6, 0.5, 0.7, None)]
    pictures = {
        len(rounds): prompt_and_training(prompts, 100, rounds, "shop / helper")
        for rounds in ([], points(1), points(4), [CurvePoint(0, 0), CurvePoint(1, 1)])
    }
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values()) and len(set(pictures.values())) == 4
