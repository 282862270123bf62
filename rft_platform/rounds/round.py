"""The stages of a round, in order: from tasks to weights that are trained, registered, served and evaluated."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rft_platform.inference.interface import PolicyEngine
from rft_platform.rounds.evaluate import evaluate_round
from rft_platform.rounds.explore import collect, explore, snapshot_for
from rft_platform.rounds.judge import judge
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import (
    Demonstrations,
    Explored,
    Judged,
    Policy,
    RoundEvaluation,
    RowSelection,
    Trained,
    parent_of,
    publish,
    read,
    refuse_if_next_round_is_trained,
    refuse_if_rows_are_read,
    snapshot_of,
)
from rft_platform.rounds.reporting.run_log import machine_watched, record_training
from rft_platform.rounds.setup.taskset_binding import OtherJudge
from rft_platform.rounds.train import train

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry
    from rft_platform.training.service.trainer_client import TrainerClient


@dataclass(frozen=True, slots=True)
class TrainedPolicy:
    """What the train stage made of one policy; a policy that is not trained has no rows and no training."""

    policy: Policy
    selection: RowSelection | None = None
    trained: Trained | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a project. Each Dagster asset of a round calls one stage; ``run`` calls all of them.

    A stage reads the record of the round, and returns and stores its part. It can be repeated after a crash: it
    continues from what is stored, and ends with the same result. Only ``explore`` refuses once a training reads its
    rows.
    """

    project: Project
    number: int
    dagster_run_id: str = ""  # for lineage

    def run(self, engine: PolicyEngine, trainer: "TrainerClient", registry: "ModelRegistry") -> RoundEvaluation:
        """All stages of the round, in order."""
        self.snapshot()
        self.explore(lambda: engine)
        self.judge()
        self.train(trainer, registry)
        return self.evaluate(engine, registry)

    def snapshot(self) -> Policy:
        """Choose the weights that explore: the newest ones that the synchronisation style permits."""
        return snapshot_for(self.project, self.number)

    def explore(self, connect: Callable[[], PolicyEngine]) -> Explored:
        """Roll out the round's tasks with the weights of ``snapshot``; store one row per model call.

        ``connect`` gives the engine. It is not called, and UserError is raised, if a training reads the stored rows.
        """
        store = self.project.store
        refuse_if_rows_are_read(store, self.number)
        policy = snapshot_of(store, self.number)
        return explore(self.project, connect(), policy, self.number)

    def collect(self) -> Explored:
        """Store committed rows of production traffic: in online projects instead of ``snapshot`` and ``explore``."""
        return collect(self.project, self.number)

    def demonstrations(self) -> Demonstrations:
        """Online projects: the corrections of users that ``collect`` stored; a lost file is written again."""
        assert self.project.traffic is not None
        return self.project.traffic.demonstrations(self.number)

    def judge(self, other: OtherJudge | None = None) -> Judged:
        """Give every run a reward, filter the rows, and compute advantages.

        ``other`` replaces the configured judge (``rft judge``); earlier judgements are kept.
        """
        return judge(self.project, self.number, other)

    def train(self, trainer: "TrainerClient", registry: "ModelRegistry") -> dict[str, TrainedPolicy]:
        """Train every policy on its rows, publish the new weights as checkpoints, and register them as model versions.

        The default policy trains last: its publication marks the round as trained. A repeated call does not repeat a
        training whose weights are published already. Returns what became of each policy, by name.
        """
        refuse_if_next_round_is_trained(self.project.store, self.number)
        first, *others = self.project.policies
        return {name: self.train_policy(name, trainer, registry) for name in (*others, first)}

    def train_policy(self, name: str, trainer: "TrainerClient", registry: "ModelRegistry") -> TrainedPolicy:
        """The train stage for one policy. For a policy that is not trained, publish its unchanged weights."""
        project, number = self.project, self.number
        if not project.policies[name].train:
            unchanged = replace(parent_of(project.store, number, name), round=number)
            publish(project.store, unchanged)
            return TrainedPolicy(unchanged)
        with machine_watched(project, registry, name):
            selection, policy, trained = train(project, trainer, number, self.dagster_run_id, name)
        registered = record_training(project, registry, read(project.store, number), policy, trained)
        return TrainedPolicy(registered, selection, trained)

    def evaluate(
        self, engine: PolicyEngine, registry: "ModelRegistry", *, force: bool = False, promote: bool = True
    ) -> RoundEvaluation:
        """Deploy the new weights to the engine, run the held-out tasks, and promote the policy if the gate passes.

        ``force`` runs the held-out tasks even if no evaluation is due in this round. With ``promote=False`` the
        champion does not change.
        """
        return evaluate_round(self.project, engine, registry, self.number, force=force, promote=promote)
