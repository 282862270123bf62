"""Invariants of MLflow and Dagster: one version per policy, no open run or held slot, a cause for each failure."""

from collections import Counter
from collections.abc import Iterator

import dagster as dg

from chaos.invariants.context import Context, Finding
from rft_platform.assets.run_failure import CAUSE_TAG, fault_of
from rft_platform.experience.file_names import round_key
from rft_platform.jobs.instance import open_instance
from rft_platform.model_registry.models import DIGEST_TAG, RegisteredModel
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.rounds.project.record import RoundEvaluation, published, read
from rft_platform.training.checkpoint.manifest import read_manifest

_ENDED = {dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED}
_CHAIN = ("policy_snapshot", "rollout_batches", "judged_experiences", "policy_checkpoint", "evaluation_report")


def every_policy_is_one_model_version(context: Context) -> Iterator[Finding]:
    """MLflow has exactly one version for the weights of each round, and the round names this version."""
    versions = context.registry().versions()
    of_digest = Counter(version.tags.get(DIGEST_TAG) for version in versions)
    known = {str(version.version): version for version in versions}
    digests = set()
    for number in context.numbers:
        policy = published(context.project.store, number)
        if policy is None or policy.policy_version == 0:
            continue
        digests.add(policy.weights_digest)
        if of_digest[policy.weights_digest] != 1:
            yield Finding(f"{round_key(number)}: {of_digest[policy.weights_digest]} model versions, expected 1", number)
        named = known.get(policy.model_version or "")
        if named is None or named.tags.get(DIGEST_TAG) != policy.weights_digest:
            yield Finding(f"{round_key(number)} names model version {policy.model_version}, not its own", number)
    for version in versions:
        if version.tags.get(DIGEST_TAG) not in digests:
            yield Finding(f"model version {version.version} holds weights that no round published")


def model_versions_point_at_their_weights(context: Context) -> Iterator[Finding]:
    """The folder of every model version exists and contains the weights with the tagged digest."""
    for version in context.registry().versions():
        if why := _misses(version):
            yield Finding(f"model version {version.version}: {why}")


def champion_was_evaluated(context: Context) -> Iterator[Finding]:
    """The champion, if there is one, has the weights that were promoted last.

    A round without a gradient keeps its parent's weights, so promoting it promotes its parent's version.
    """
    champion = context.registry().champion()
    promoted = [
        number
        for number in context.numbers
        if (read(context.project.store, number).evaluated or RoundEvaluation()).promoted
    ]
    if champion is None:
        if promoted:
            yield Finding(f"{', '.join(map(round_key, promoted))} promoted their policy, but there is no champion")
        return
    number = int(champion.tags["round"])
    if not promoted:
        yield Finding(f"the champion is of {round_key(number)}, but no evaluation promoted any", number)
        return
    policy = published(context.project.store, promoted[-1])
    if policy is None or policy.weights_digest != champion.tags[DIGEST_TAG]:
        yield Finding(
            f"the champion is of {round_key(number)}, but {round_key(promoted[-1])} was promoted last", number
        )


def no_run_is_open(context: Context) -> Iterator[Finding]:
    """Every Dagster run has ended."""
    with open_instance(context.home) as instance:
        runs = instance.get_runs()
    context.facts["dagster_runs"] = float(len(runs))
    for run in runs:
        if run.status not in _ENDED:
            yield Finding(f"run {run.run_id} of {run.job_name} is still {run.status.value}")


def no_pool_slot_is_held(context: Context) -> Iterator[Finding]:
    """No run holds a pool slot or waits for one."""
    with open_instance(context.home) as instance:
        storage = instance.event_log_storage
        for key in storage.get_concurrency_keys():
            found = storage.get_concurrency_info(key)
            if found.claimed_slots or found.pending_steps:
                runs = {slot.run_id for slot in found.claimed_slots} | {step.run_id for step in found.pending_steps}
                yield Finding(f"pool {key} is held or waited for by {', '.join(sorted(runs))}")


def every_asset_of_every_round_is_known(context: Context) -> Iterator[Finding]:
    """Dagster has a partition for each round (and perhaps the next), with every asset of each round materialized."""
    expected = {round_key(number) for number in context.numbers}
    following = round_key(max(context.numbers, default=0) + 1)
    with open_instance(context.home) as instance:
        partitions = set(instance.get_dynamic_partitions(str(PLAIN_NAMES.rounds.name)))
        if partitions - {following} != expected:
            different = sorted((partitions - {following}) ^ expected)
            yield Finding(f"partitions that differ from the rounds: {', '.join(different)}")
        for name in _CHAIN:
            missing = expected - instance.get_materialized_partitions(dg.AssetKey(name))
            if missing:
                yield Finding(f"{name} was never materialised in {', '.join(sorted(missing))}")


def every_failure_has_a_cause(context: Context) -> Iterator[Finding]:
    """Every failed run has a cause in its tags or in its last event."""
    failed = [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
    with open_instance(context.home) as instance:
        runs = instance.get_runs(dg.RunsFilter(statuses=failed))
        context.facts["failed_runs"] = float(len(runs))
        for run in runs:
            if not (fault_of(run).get(CAUSE_TAG) or "").strip() and not _last_words(instance, run.run_id):
                yield Finding(f"run {run.run_id} of {run.job_name} failed without a word")


def _last_words(instance: dg.DagsterInstance, run_id: str) -> str:
    ends = {dg.DagsterEventType.RUN_FAILURE, dg.DagsterEventType.RUN_CANCELED}
    messages = [entry.dagster_event.message for entry in instance.all_logs(run_id, of_type=ends) if entry.dagster_event]
    return next((message for message in messages if message and message.strip()), "")


def _misses(version: RegisteredModel) -> str | None:
    if not version.folder.is_dir():
        return f"its folder {version.folder} does not exist"
    manifest = read_manifest(version.folder)
    if manifest is None or manifest.weights_digest != version.tags.get(DIGEST_TAG):
        return f"{version.folder} holds other weights than it was registered with"
    return None
