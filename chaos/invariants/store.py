"""Invariants of rows, notes and checkpoints: complete, no duplicates, and equal weights to the undisturbed run."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos.invariants.context import Context, Finding
from rft_platform.common.digests import THINNED
from rft_platform.common.errors import StorageError
from rft_platform.experience.file_names import round_key
from rft_platform.rounds.project.record import Policy, parent_of, published, read, steps_before
from rft_platform.training.checkpoint.manifest import read_manifest, verify

_SHOWN = 3
_NOTES = {"snapshot-policy", "explore", "judge", "row_selection-policy", "train-policy", "policy-policy", "evaluation"}


def row_ids_are_unique(context: Context) -> Iterator[Finding]:
    """Row ids are unique in the whole store."""
    seen: Counter[str] = Counter()
    for number in context.numbers:
        seen.update(context.project.store.read_rollouts(number, columns=["row_id"])["row_id"].to_pylist())
    context.facts["rows"] = float(seen.total())
    doubled = [row for row, count in seen.items() if count > 1]
    if doubled:
        yield Finding(f"{len(doubled)} row ids stand more than once, {', '.join(doubled[:_SHOWN])} among them")


def rows_are_complete(context: Context) -> Iterator[Finding]:
    """Every round has tasks x runs x batches rows, in its files and in its ledger."""
    store, expected = context.project.store, context.project.batches.experiences_a_round
    for number in context.numbers:
        found = store.read_rollouts(number, columns=["row_id"]).num_rows
        if store.count_rollouts(number) != expected:
            yield Finding(f"{round_key(number)}: {store.count_rollouts(number)} rows recorded, not {expected}", number)
        if found != expected:
            yield Finding(f"{round_key(number)} has {found} rows, expected {expected}", number)


def rows_are_of_one_version(context: Context) -> Iterator[Finding]:
    """The rows of a round were sampled by one policy version, which its snapshot names."""
    for number in context.numbers:
        versions = set(context.project.store.read_rollouts(number, ["policy_version"])["policy_version"].to_pylist())
        snapshot = read(context.project.store, number).snapshot()
        named = None if snapshot is None else snapshot.policy_version
        if versions != {named}:
            yield Finding(
                f"{round_key(number)} has rows of policy versions {sorted(versions)}, and its snapshot names {named}",
                number,
            )


def rows_and_judgements_match(context: Context) -> Iterator[Finding]:
    """Every rollout row has exactly one judgement, and every judged row has a rollout."""
    store = context.project.store
    for number in context.numbers:
        rolled = Counter(store.read_rollouts(number, columns=["row_id"])["row_id"].to_pylist())
        judged = Counter(store.read_judged(number, columns=["row_id"])["row_id"].to_pylist())
        if rolled != judged:
            lost, extra = (rolled - judged).total(), (judged - rolled).total()
            yield Finding(f"{round_key(number)}: {lost} rows are not judged, {extra} judgements have no row", number)


def files_are_as_written(context: Context) -> Iterator[Finding]:
    """Every file of the store has its recorded digest, and no file was set aside."""
    for number in context.numbers:
        for damaged in context.project.store.damaged(number, digest=True):
            yield Finding(f"{round_key(number)}: {damaged.path} is damaged: {damaged.why}", number)
        aside = context.project.store.round_folder(number) / "aside"
        if aside.is_dir() and any(aside.iterdir()):
            names = ", ".join(sorted(path.name for path in aside.iterdir())[:_SHOWN])
            yield Finding(f"{round_key(number)}: {names} had to be set aside, and nobody had damaged it", number)


def notes_are_complete(context: Context) -> Iterator[Finding]:
    """Every round has the note of every phase, and there is no round beyond the budget."""
    store = context.project.store
    for number in context.numbers:
        missing = sorted(_NOTES - set(store.notes(number)))
        if missing:
            yield Finding(f"{round_key(number)} lacks the notes {', '.join(missing)}", number)
    beyond = [number for number in store.rounds() if number > context.rounds]
    if beyond:
        yield Finding(f"rounds {', '.join(map(round_key, beyond))} lie beyond the budget of {context.rounds}")


def checkpoints_are_whole(context: Context) -> Iterator[Finding]:
    """Every round published one policy, and its checkpoint matches the digests of its manifest."""
    for number in context.numbers:
        policy = published(context.project.store, number)
        if policy is None:
            yield Finding(f"{round_key(number)} has published no policy", number)
            continue
        if (Path(policy.folder) / THINNED).exists():
            continue  # its weights were removed on purpose
        for why in _faults(policy):
            yield Finding(f"{round_key(number)}: {why}", number)


def checkpoints_are_all_published(context: Context) -> Iterator[Finding]:
    """Every checkpoint in the folder was published by a round."""
    policies = [published(context.project.store, number) for number in context.numbers]
    known = {Path(policy.folder) for policy in policies if policy is not None}
    for folder in sorted(context.project.checkpoints.glob("global_step_*")):
        if folder not in known:
            yield Finding(f"{folder} was published by no round")


def versions_follow_each_other(context: Context) -> Iterator[Finding]:
    """A round's policy version is its parent's plus the optimiser steps in its note."""
    store = context.project.store
    for number in context.numbers:
        policy, trained = published(store, number), read(store, number).trained()
        if policy is None or trained is None:
            continue  # other invariants report it
        # A training that starts again from an earlier version counts from the newest one.
        before = max(parent_of(store, number).policy_version, steps_before(store, number) if trained.steps else 0)
        if policy.policy_version != before + trained.steps:
            yield Finding(
                f"{round_key(number)} published version {policy.policy_version}, but the version before has "
                f"{before} and it trained {trained.steps} steps",
                number,
            )


def weights_equal_the_undisturbed_run(context: Context) -> Iterator[Finding]:
    """Every round ends with the weights of the reference, bit for bit."""
    if context.reference is None:
        return
    equal, worst = 0, 0.0
    for number in context.numbers:
        ours, theirs = published(context.project.store, number), published(context.reference.store, number)
        if ours is None or theirs is None:
            whose = "the project" if ours is None else "the undisturbed run"
            yield Finding(f"{round_key(number)}: {whose} has no weights to compare", number)
            continue
        same = ours.weights_digest == theirs.weights_digest
        equal += same
        difference = 0.0 if same else _difference(ours, theirs)
        worst = max(worst, difference)
        if not same:
            yield Finding(f"{round_key(number)}: weights differ from the undisturbed run by {difference:.2g}", number)
    context.facts.update(rounds_with_equal_digest=float(equal), largest_weight_difference=worst)


def _faults(policy: Policy) -> Iterator[str]:
    try:
        manifest = read_manifest(Path(policy.folder))
        if manifest is None:
            yield f"{policy.folder} has no manifest"
            return
        verify(Path(policy.folder), manifest)
    except StorageError as error:
        yield str(error)
        return
    if manifest.weights_digest != policy.weights_digest:
        yield f"{policy.folder} holds other weights than the round published"


def _difference(ours: Policy, theirs: Policy) -> float:
    a, b = (_weights(Path(policy.folder)) for policy in (ours, theirs))
    if a.keys() != b.keys():
        return float("inf")
    return max(float(abs(tensor - b[name]).max()) for name, tensor in a.items())


def _weights(folder: Path) -> dict[str, Any]:
    """The tensors of all files of a checkpoint: large weights come in several."""
    from safetensors.numpy import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
