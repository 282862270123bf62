"""Offline training: train a base model on demonstrations, preference pairs or a teacher's distribution.

The training is the only round of its project. Its dataset, training, policy and evaluation are stored in ``r0001``, in
the same form as those of other projects' rounds.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_platform.common.digests import digest_weights
from rft_platform.common.errors import UserError
from rft_platform.config.load import config_digest
from rft_platform.config.resolve import OfflineKind
from rft_platform.config.training_specs import optimizer_spec
from rft_platform.experience.file_names import round_key
from rft_platform.inference.interface import PolicyEngine
from rft_platform.rounds.evaluate import evaluate_round, is_due
from rft_platform.rounds.offline_dataset import required_dataset
from rft_platform.rounds.project.code_version import code_version
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import (
    DatasetFile,
    Policy,
    RoundEvaluation,
    Trained,
    publish,
    published,
    read,
    required,
    write,
)
from rft_platform.rounds.setup.connections import base_model_folder, connect_registry, connect_trainer
from rft_platform.rounds.train import Training, refuse_if_next_round_is_trained, run_training
from rft_platform.rounds.train_request import loaded_digest, reference_folder, spec_with_critic, teacher_folder
from rft_platform.training.protocol import TrainRequest

if TYPE_CHECKING:
    from rft_platform.model_registry.models import ModelRegistry
    from rft_platform.training.service.trainer_client import TrainerClient

ROUND = 1
_CANARY_ROWS = 8
_CANARY_TOKENS = 48  # per row: enough to tell weights apart, within the limit of any model


def train_offline(
    project: Project, trainer: "TrainerClient", kind: OfflineKind, round_number: int, dagster_run_id: str
) -> Trained:
    """Train on the round's dataset and publish the policy. A repeated call after a kill gives the same weights.

    Raises UserError if the project runs another kind of training, StorageError if the dataset is missing.
    """
    check_kind(project, kind, round_number)
    refuse_if_next_round_is_trained(project.store, round_number)
    dataset = required_dataset(project, round_number)
    parent = starting_policy(project)
    request = offline_request(project, dataset, parent, dagster_run_id)
    training = Training(
        request=request,
        parent=parent,
        round=round_number,
        total_steps=project.settings.offline_steps(dataset.rows),
        reads=(parent,),
        canary_sequences=partial(_canary_sequences, Path(dataset.path), Path(parent.folder)),
    )
    return run_training(project, trainer, training)


def check_kind(project: Project, kind: OfflineKind, round_number: int) -> None:
    """Raise UserError unless the project runs this kind of training."""
    if project.settings.offline != kind or round_number != ROUND:
        here = (
            f"{project.settings.offline}_job for {round_key(ROUND)}"
            if project.settings.offline
            else "the jobs of rounds"
        )
        raise UserError(
            f"{kind}_job for {round_key(round_number)}: the project {project.config.project}/{project.config.name} "
            f"runs {here} (mode {project.config.mode}, algorithm_type {project.config.algorithm.algorithm_type})"
        )


def start_training(project: Project) -> None:
    """Start trainer and registry in parallel: each takes seconds, mostly for imports."""
    with ThreadPoolExecutor(1) as pool:
        registry = pool.submit(connect_registry(project).prepare)
        connect_trainer(project)
        registry.result()


def starting_policy(project: Project) -> Policy:
    """The base model as policy version 0, published on first use."""
    known = published(project.store, 0)
    if known is not None:
        return known
    folder = base_model_folder(project)
    policy = Policy(str(folder), 0, digest_weights(folder), round=0)
    publish(project.store, policy)
    return policy


def offline_request(project: Project, dataset: DatasetFile, parent: Policy, dagster_run_id: str) -> TrainRequest:
    """The request for the trainer; equal for the same dataset and configuration."""
    config, algorithm = project.config, spec_with_critic(project)
    pairs = project.settings.offline == "dpo"
    return TrainRequest(
        parent=parent.folder,
        parent_version=parent.policy_version,
        output=str(project.checkpoints),
        algorithm=algorithm,
        optimizer=optimizer_spec(config.algorithm.optimizer, project.settings.offline_steps(dataset.rows)),
        demonstrations=None if pairs else dataset.path,
        preferences=dataset.path if pairs else None,
        train_batch_size=project.batches.train_batch_size,
        max_steps=config.offline_steps,
        epochs=config.buffer.total_epochs,
        max_tokens_per_pack=project.memory.max_tokens_per_pack,
        max_tokens_per_row=config.model.max_model_len,
        seed=config.seed,
        fresh_optimizer=True,
        lora=project.settings.lora,
        reference=reference_folder(project, algorithm),
        teacher=teacher_folder(project),
        save_interval=config.trainer.save_interval,
        save_hf_checkpoint=config.trainer.save_hf_checkpoint,
        max_checkpoints_to_keep=config.trainer.max_checkpoints_to_keep,
        lineage=offline_lineage(project, dataset, dagster_run_id),
    )


def offline_lineage(project: Project, dataset: DatasetFile, dagster_run_id: str) -> dict[str, Any]:
    """Origin of the weights, stored in the checkpoint's manifest and the tags of its model version."""
    config = project.config
    teacher = {"teacher": config.algorithm.teacher_model_path} if project.settings.offline == "distill" else {}
    return {
        "round": ROUND,
        "project": config.project,
        "name": config.name,
        "base_model": config.model.model_path,
        "algorithm": config.algorithm.algorithm_type,
        **teacher,
        "dataset": Path(dataset.path).name,
        "dataset_rows": dataset.rows,
        "dataset_sha256": dataset.sha256,
        "data_digest": dataset.digest,
        "source": dataset.source,
        "source_sha256": dataset.source_digest,
        "config_digest": config_digest(config),
        "code_version": code_version(),
        "dagster_run_id": dagster_run_id,
        **({"plugins_digest": loaded_digest(config)} if config.algorithm.plugins else {}),
    }


def _canary_sequences(dataset: Path, model: Path) -> list[list[int]]:
    """Token sequences for the canary: the first tokens of a few rows. Any sequences would serve to compare weights."""
    import json

    import pyarrow.parquet as pq

    with pq.ParquetFile(dataset) as file:
        table = next(file.iter_batches(_CANARY_ROWS)).to_pydict()
    names = [name for name in ("messages", "prompt", "chosen", "completion") if name in table]
    texts = [
        " ".join(str(message["content"]) for name in names for message in json.loads(table[name][row]))
        for row in range(len(table[names[0]]))
    ]
    sequences = [ids[:_CANARY_TOKENS] for ids in _encode(model, texts)]
    return [ids for ids in sequences if len(ids) > 1]


def _encode(model: Path, texts: list[str]) -> list[list[int]]:
    """Token ids of texts. Reads ``tokenizer.json`` directly if it exists: importing transformers takes seconds."""
    file = model / "tokenizer.json"
    if file.exists():
        from tokenizers import Tokenizer

        encoded = Tokenizer.from_file(str(file)).encode_batch(texts, add_special_tokens=False)
        return [each.ids for each in encoded]
    from rft_platform.openai_api.tokenizer import PolicyTokenizer

    return PolicyTokenizer(model).encode(texts)


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
        outcome = RoundEvaluation("no held-out tasks: set buffer.explorer_input.eval_tasksets to evaluate the policy")
        write(project.store, round_number, outcome)
        return outcome
    engine = connect_engine()
    if round_number and is_due(project, 0) and not read(project.store, 0).has(RoundEvaluation):
        evaluate_round(project, engine, registry, 0)
    return evaluate_round(project, engine, registry, round_number, force=force, promote=promote)
