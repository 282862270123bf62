"""Figures over seeds: the mean and its interval."""

import pytest
import recipe_seeds


def test_the_interval_is_that_of_student_for_any_number_of_seeds() -> None:
    assert recipe_seeds.over_seeds([1.0]) == {"mean": 1.0, "values": [1.0]}
    few, many = recipe_seeds.over_seeds([0.0, 1.0]), recipe_seeds.over_seeds([0.0, 1.0] * 6)
    assert (few["mean"], few["high"]) == (0.5, pytest.approx(0.5 + 12.706 * 0.5, abs=1e-3))
    assert many["high"] == pytest.approx(0.5 + 2.201 * 0.5222 / 12**0.5, abs=1e-3)  # 11 degrees of freedom
