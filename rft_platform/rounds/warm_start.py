"""The starting policy (round 0): the base model, first fine-tuned on demonstrations if configured."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rft_platform.algorithms.spec import AlgorithmSpec, OptimizerSpec
from rft_platform.common.digests import digest_weights
from rft_platform.common.progress import report
from rft_platform.config.load import config_digest
from rft_platform.config.schema.trainer import WarmStart
from rft_platform.config.training_specs import optimizer_spec
from rft_platform.inference.canary import Canary
from rft_platform.inference.interface import PolicyEngine
from rft_platform.object_store.mirror import removing
from rft_platform.rounds.evaluate import is_due, sampled_pass
from rft_platform.rounds.project.code_version import code_version
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, WarmStartRun, publish, published, write
from rft_platform.rounds.setup.connections import base_model_folder, free_gpus, publish_base, start_all
from rft_platform.rounds.setup.demonstrations import EXPERTS, WARM_START, most_steps, write_demonstrations
from rft_platform.training.checkpoint.manifest import MANIFEST
from rft_platform.training.protocol import StepEvent, TrainRequest

if TYPE_CHECKING:
    from rft_platform.training.service.trainer_client import TrainerClient

LOG = logging.getLogger(__name__)
_CANARY_TASKS = 8
_CANARY_PROMPTS = ("What is 12*7?", "Where is my parcel?", "Write a haiku about the sea.", "Hello!")


def make_starting_policy(
    project: Project,
    connect_engine: Callable[[Project], PolicyEngine],
    connect_trainer: Callable[[Project], "TrainerClient"],
    dagster_run_id: str,
) -> Policy:
    """Publish policy version 0, which round 1 explores with; if it is already published, keep it."""
    start_all(project)
    write_experts(project)
    _, *others = project.policies
    for name in others:
        publish_base(project, name)
    known = published(project.store, 0)
    if known is not None:
        return known
    settings, engine = project.config.warm_start, connect_engine(project)
    if settings is None:
        return publish_base(project)
    policy = WarmStartTraining(project, settings, engine, connect_trainer(project), dagster_run_id).run()
    publish(project.store, policy)
    return policy


def write_experts(project: Project) -> None:
    """Write the demonstrations of a dataset that trainings mix into their rows, unless they are written already."""
    experts, target = project.config.algorithm.experts, project.store.round_folder(0) / EXPERTS
    if experts is not None and experts.path is not None and not target.exists():
        write_demonstrations(experts, target, section="algorithm.experts")


@dataclass(slots=True)
class WarmStartTraining:
    """Supervised fine-tuning in segments of ``eval_every`` steps until a target score on held-out tasks.

    The learning rate then falls to 0. A small model learns such a task suddenly, at a different step for every seed: a
    target score gives starting policies of equal skill, a fixed number of steps does not.
    """

    project: Project
    settings: WarmStart
    engine: PolicyEngine
    trainer: "TrainerClient"
    dagster_run_id: str
    folder: str = ""
    step: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)

    def run(self) -> Policy:
        """Train from the base model; returns the resulting policy as version 0."""
        folder = self.project.warm_start_checkpoints
        if folder.exists():  # left by an interrupted run; starting over gives the same weights
            with removing(folder):
                shutil.rmtree(folder)
        self.folder = str(base_model_folder(self.project))
        demonstrations = self.project.store.round_folder(0) / WARM_START
        digest = write_demonstrations(self.settings, demonstrations)
        settings = self.settings = _with_steps(self.settings, demonstrations)
        report("warm start", 0, settings.steps, self.goal)
        peak = optimizer_spec(settings.optimizer, settings.steps)
        cools = settings.cooldown_steps > 0 and settings.stop_at is not None
        while (rest := settings.steps - self.step) > 0 and not self._target_reached():
            steps = min(settings.eval_every, rest)
            self._train_segment(demonstrations, digest, steps, peak, last=steps == rest and not cools)
        if cools:
            end = self.step + settings.cooldown_steps
            falling = replace(
                peak, lr_scheduler_type="linear", lr_warmup_steps=0, schedule_start=self.step, total_steps=end
            )
            self._train_segment(demonstrations, digest, settings.cooldown_steps, falling, last=True)
        reached = {name: value for name, value in self.curve[-1].items() if name != "step"}
        report("warm start", self.step, self.step, **reached)
        write(self.project.store, 0, WarmStartRun(self.step, self.curve, digest))
        canary = self._canary()
        return Policy(self.folder, 0, digest_weights(Path(self.folder)), round=0, canary=canary)

    @property
    def goal(self) -> str:
        """The condition that ends training before its last step, as text; empty if there is none."""
        target = self.settings.stop_at
        return "" if target is None else f"sampled_pass reaches {target:g}"

    def _target_reached(self) -> bool:
        target = self.settings.stop_at
        return bool(target is not None and self.curve and self.curve[-1]["sampled_pass"] >= target)

    def _train_segment(
        self, demonstrations: Path, digest: str, steps: int, optimizer: OptimizerSpec, *, last: bool = False
    ) -> None:
        """Train ``steps`` more steps from the current state, then evaluate on the held-out tasks.

        The evaluation of the start measures the last weights: if it is due, they are not evaluated twice.
        """
        free_gpus(self.project)
        result = self.trainer.train(self._request(demonstrations, digest, steps, optimizer), self._on_step)
        too_long = int(result.metrics.get("rows_too_long", 0))
        if too_long and not self.step:
            LOG.warning("warm start: %d demonstrations longer than max_model_len are excluded", too_long)
        before, self.folder = self.folder, result.checkpoint
        if self.step:
            _keep_manifest_only(Path(before))
        self.step = result.policy_version
        point = {"step": float(self.step), "loss": result.metrics["loss"]}
        if self.project.eval_tasks and not (last and is_due(self.project, 0)):
            self.engine.update_weights(Path(self.folder), 0)
            point["sampled_pass"] = sampled_pass(self.project, self.engine)
        self.curve.append(point)
        if self.step < self.settings.steps:  # ``run`` reports the end
            numbers = {name: value for name, value in point.items() if name != "step"}
            report("warm start", self.step, self.settings.steps, self.goal, **numbers)

    def _on_step(self, event: StepEvent) -> None:
        if event.step < self.settings.steps:  # the end of a segment is reported with its evaluation
            known = (self.curve[-1] if self.curve else {}) | event.metrics
            numbers = {name: known[name] for name in ("loss", "sampled_pass") if name in known}
            report("warm start", event.step, self.settings.steps, self.goal, **numbers)

    def _request(self, demonstrations: Path, digest: str, steps: int, optimizer: OptimizerSpec) -> TrainRequest:
        config = self.project.config
        return TrainRequest(
            parent=self.folder,
            parent_version=self.step,
            output=str(self.project.warm_start_checkpoints),
            algorithm=AlgorithmSpec(policy_loss="sft", loss_agg_mode="token-mean"),
            optimizer=optimizer,
            demonstrations=str(demonstrations),
            train_batch_size=self.settings.batch_size,
            max_steps=steps,
            max_tokens_per_pack=self.project.memory.max_tokens_per_pack,
            max_tokens_per_row=config.model.max_model_len,
            seed=config.seed,
            lineage={
                "round": 0,
                "project": config.project,
                "name": config.name,
                "base_model": config.model.model_path,
                "data_digest": digest,
                "config_digest": config_digest(config),
                "code_version": code_version(),
                "dagster_run_id": self.dagster_run_id,
            },
        )

    def _canary(self) -> Canary:
        """The trainer's log-probs on a few prompts: of the tasks, or fixed ones in an online project without tasks."""
        prompts = [task.prompt for task in self.project.tasks.tasks[:_CANARY_TASKS]] or _CANARY_PROMPTS
        sequences = self.engine.render([[{"role": "user", "content": prompt}] for prompt in prompts])
        return Canary(sequences, self.trainer.score(sequences))


def _with_steps(settings: WarmStart, demonstrations: Path) -> WarmStart:
    """``settings`` with the number of steps that its number of passes over the demonstrations gives."""
    if settings.epochs is None:
        return settings
    import pyarrow.parquet as pq

    return settings.model_copy(update={"steps": most_steps(settings, pq.read_metadata(demonstrations).num_rows)})


def _keep_manifest_only(checkpoint: Path) -> None:
    """Remove the previous segment's weights; keep its manifest, which is part of the lineage."""
    gone = [item for item in checkpoint.iterdir() if item.name != MANIFEST]
    with removing(*gone):
        for item in gone:
            shutil.rmtree(item) if item.is_dir() else item.unlink()
