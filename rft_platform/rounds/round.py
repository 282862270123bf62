"""The stages of a round, in order: from tasks to weights that are trained, registered, served and evaluated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rft_platform.inference.interface import PolicyEngine
from rft_platform.rounds.evaluate import RoundEvaluation, evaluate_round
from rft_platform.rounds.explore import explore, snapshot_for
from rft_platform.rounds.judge import judge
from rft_platform.rounds.project.policy import Policy, parent_of, publish, snapshot_of
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.register_checkpoint import register
from rft_platform.rounds.setup.taskset_binding import OtherJudge
from rft_platform.rounds.train import lineage, refuse_with_successor, train
from rft_platform.training.protocol import StepEvent, TrainResult

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry
    from rft_platform.training.service.trainer_client import TrainerClient


@dataclass(frozen=True, slots=True)
class RoundTraining:
    """What the train stage made: the first policy, and each further policy with its result (None: not trained)."""

    policy: Policy
    result: TrainResult
    steps: list[StepEvent]
    further: Mapping[str, tuple[Policy, TrainResult | None]]


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a project. Each Dagster asset of a round calls one stage; ``run`` calls all of them.

    A stage can be repeated after a crash: it continues from what is stored, and ends with the same result.
    """

    project: Project
    number: int
    run_id: str = ""  # of the orchestrator, for lineage

    def run(self, engine: PolicyEngine, trainer: "TrainerClient", registry: "ModelRegistry") -> RoundEvaluation:
        """All stages of the round, in order."""
        self.snapshot()
        self.explore(engine)
        self.judge()
        self.train(trainer, registry)
        return self.evaluate(engine, registry)

    def snapshot(self) -> Policy:
        """Choose the weights that explore: the newest ones that the synchronisation style permits."""
        return snapshot_for(self.project, self.number)

    def explore(self, engine: PolicyEngine) -> dict[str, Any]:
        """Roll out the round's tasks with these weights; store one row per model call."""
        return explore(self.project, engine, snapshot_of(self.project.store, self.number), self.number)

    def judge(self, other: OtherJudge | None = None) -> dict[str, Any]:
        """Give every run a reward, filter the rows, and compute advantages."""
        return judge(self.project, self.number, other)

    def train(self, trainer: "TrainerClient", registry: "ModelRegistry") -> RoundTraining:
        """Train on the rows, publish the new weights as a checkpoint, and register it as a model version.

        The first policy trains last, because its note marks the round as trained.
        """
        further = train_further(self.project, trainer, registry, self.number, self.run_id)
        result, steps = train(self.project, trainer, self.number, self.run_id)
        origin = lineage(self.project, self.number, self.run_id)
        policy = register(self.project, registry, self.number, result, steps, origin)
        return RoundTraining(policy, result, steps, further)

    def evaluate(
        self, engine: PolicyEngine, registry: "ModelRegistry", *, force: bool = False, promote: bool = True
    ) -> RoundEvaluation:
        """Deploy the new weights to the engine, run the held-out tasks, and promote the policy if the gate passes."""
        return evaluate_round(self.project, engine, registry, self.number, force=force, promote=promote)


def train_further(
    project: Project, trainer: "TrainerClient", registry: "ModelRegistry", round_number: int, run_id: str
) -> dict[str, tuple[Policy, TrainResult | None]]:
    """Train each further policy on its own rows, one after the other, and register the results.

    A repeated call does not repeat a training that is already published. A policy with ``train: false`` is published
    unchanged, with None as its result.
    """
    store = project.store
    refuse_with_successor(store, round_number)
    done: dict[str, tuple[Policy, TrainResult | None]] = {}
    for entry in project.config.policies:
        if not entry.train:
            kept = replace(parent_of(store, round_number, entry.name), round=round_number)
            publish(store, kept)
            done[entry.name] = kept, None
            continue
        result, steps = train(project, trainer, round_number, run_id, entry.name)
        made_of = lineage(project, round_number, run_id, entry.name)
        policy = register(project, registry, round_number, result, steps, made_of, entry.name)
        done[entry.name] = policy, result
    return done
