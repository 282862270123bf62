"""Evaluation of an offline training: the base model and the trained policy, if there are held-out tasks."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rft_platform.inference.interface import PolicyEngine
from rft_platform.rounds.curve import EVALUATION
from rft_platform.rounds.evaluate import RoundEvaluation, evaluate_round, is_due
from rft_platform.rounds.policy import required
from rft_platform.rounds.project import Project

if TYPE_CHECKING:
    from rft_platform.registry.models import ModelRegistry


def evaluate_offline(
    project: Project,
    connect_engine: Callable[[], PolicyEngine],
    registry: "ModelRegistry",
    round_number: int,
    force: bool = False,
    promote: bool = True,
) -> RoundEvaluation:
    """Evaluate the round's policy and, if not done before, the base model.

    The base model comes first, so that the report can show the difference. Without held-out tasks nothing is evaluated
    and no engine is started.
    """
    required(project.store, round_number)
    if not project.eval_tasks:
        outcome = RoundEvaluation("no held-out tasks: set buffer.explorer_input.eval_tasksets to have it measured")
        note = {"results": [], "gate": outcome.gate, "promoted": False, "metrics": {}}
        project.store.write_note(round_number, EVALUATION, note)
        return outcome
    engine = connect_engine()
    if round_number and is_due(project, 0) and not project.store.has_note(0, EVALUATION):
        evaluate_round(project, engine, registry, 0)
    return evaluate_round(project, engine, registry, round_number, force=force, promote=promote)
