"""Judges of length: penalties of at most 0 per run, and ``shortest``, which ranks the runs of a group."""

from typing import Any

from rft_platform.judging.judged_run import JudgedRun


def steps_penalty(
    task: dict[str, Any],
    response: Any,
    run: JudgedRun,
    *,
    per_step: float = -0.1,
    free_steps: int = 0,
    lowest: float | None = None,
) -> float:
    """``per_step`` for every model call of the run beyond the first ``free_steps``; never below ``lowest``.

    A call with several choices (``n``) counts once.
    """
    if per_step > 0:
        raise ValueError(f"per_step is {per_step}: a penalty is 0 or negative")
    penalty = per_step * max(0, len({step.step for step in run.steps}) - free_steps)
    return penalty if lowest is None else max(penalty, lowest)


def length_penalty(
    task: dict[str, Any], response: Any, run: JudgedRun, *, max_tokens: int, margin_tokens: int = 0
) -> float:
    """0.0 for a run of up to ``max_tokens`` sampled tokens, falling to -1.0 over the next ``margin_tokens``.

    The tokens of all calls of the run count; the operator ``overlong_penalty`` counts the longest response only.
    """
    over = run.response_tokens - max_tokens
    if over <= 0:
        return 0.0
    return -min(1.0, over / margin_tokens) if margin_tokens else -1.0


def shortest(task: dict[str, Any], responses: list[Any], runs: list[JudgedRun]) -> list[float]:
    """1.0 for the run of a group with the fewest sampled tokens, 0.0 for the run with the most, by rank in between.

    Runs of equal length have the same rank. If all runs have equal length, or the group has one run, each gets 0.5.
    Only useful together with a judge of the answers' content.
    """
    lengths = [run.response_tokens for run in runs]
    if len(lengths) < 2:
        return [0.5] * len(lengths)
    below = [sum(other < length for other in lengths) for length in lengths]
    equal = [sum(other == length for other in lengths) - 1 for length in lengths]
    most = len(lengths) - 1
    return [1.0 - (less + same / 2) / most for less, same in zip(below, equal, strict=True)]
