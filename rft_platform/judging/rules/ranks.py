"""Judges of groups that compare numbers of a group's runs."""

from typing import Any

from rft_platform.judging.judged_run import JudgedRun


def shortest(task: dict[str, Any], responses: list[Any], runs: list[JudgedRun]) -> list[float]:
    """1.0 for the run of a group with the fewest sampled tokens, 0.0 for the most, by rank in between.

    Runs of equal length share their rank; if all are equal, or a run is alone, each gets 0.5. Only useful together with
    a judge of the answers' content.
    """
    lengths = [run.response_tokens for run in runs]
    if len(lengths) < 2:
        return [0.5] * len(lengths)
    below = [sum(other < length for other in lengths) for length in lengths]
    equal = [sum(other == length for other in lengths) - 1 for length in lengths]
    most = len(lengths) - 1
    return [1.0 - (less + same / 2) / most for less, same in zip(below, equal, strict=True)]
