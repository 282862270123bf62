"""Check ``explorer.auxiliary_models`` and ``policies``, the models in addition to section ``model``."""

from collections.abc import Iterator

from rft_platform.common.policy_names import DEFAULT_POLICY
from rft_platform.config.findings import Finding, error
from rft_platform.config.resolve import RunSettings
from rft_platform.config.schema.explorer import AuxiliaryModel, RolloutModel
from rft_platform.config.schema.rft_config import RftConfig

#: Keys of a model that the platform serves. They have no effect on a model that is served elsewhere.
_OF_SERVING = sorted((set(RolloutModel.model_fields) - {"enable_thinking"}) | {"max_model_len"})


def auxiliary_problems(run: RunSettings) -> Iterator[Finding]:
    """One line for each entry with missing or conflicting keys, and for each name that two entries share."""
    entries = run.config.explorer.auxiliary_models
    for index, entry in enumerate(entries):
        yield from _problems(f"explorer.auxiliary_models[{index}]", entry)
    leases = [lease for entry in entries for lease in _leases(entry)]
    shared = {entry.known_as for entry in entries if any(leases.count(lease) > 1 for lease in _leases(entry))}
    for name in sorted(shared):
        yield error(
            f"explorer.auxiliary_models: {name!r} does not identify one model (names must differ in "
            "letters, digits, - or _); give each a unique name"
        )


def _problems(key: str, entry: AuxiliaryModel) -> Iterator[Finding]:
    if not entry.model_path and not entry.base_url:
        yield error(
            f"{key}: neither model_path nor base_url is set; give a model to serve, or the URL "
            "of one that is already served"
        )
    if entry.base_url is None:
        for name in ("model", "api_key_env"):
            if getattr(entry, name) is not None:
                yield error(f"{key}.{name} is only for a model that is served elsewhere: set base_url, or leave it out")
        return
    if entry.model_path:
        yield error(f"{key}: model_path and base_url are both set; remove one of them")
    if not entry.base_url.startswith(("http://", "https://")):
        wanted = "the root of an OpenAI-compatible API, as in https://host/v1"
        yield error(f"{key}.base_url {entry.base_url!r}: expected {wanted}")
    if not entry.model:
        yield error(f"{key}.model is not set: {entry.base_url} may serve several models; give the name of one")
    written = [name for name in _OF_SERVING if name in entry.model_fields_set and _differs(entry, name)]
    if written:
        yield error(f"{key}: {', '.join(written)} cannot be set for a model that is served elsewhere; leave it out")


def _differs(entry: AuxiliaryModel, name: str) -> bool:
    return bool(getattr(entry, name) != AuxiliaryModel.model_fields[name].get_default())


def _leases(entry: AuxiliaryModel) -> list[str]:
    """Lease names of the entry's engines.

    A model that is served elsewhere has no lease; the name that its lease would have is returned to compare names.
    """
    further = 0 if entry.base_url else entry.engine_num - 1
    return [entry.lease, *(f"{entry.lease}-{number + 1}" for number in range(further))]


#: A policy must not have these names: other folders beside the checkpoint folders of policies have them.
_TAKEN = ("aside", "intermediate", "warm_start")


def policies_problems(run: RunSettings) -> Iterator[Finding]:
    """One line for each invalid name and for each setting that does not support several policies."""
    config = run.config
    if not config.policies:
        return
    yield from _name_problems(config)
    for key, is_set, instead in _unsupported(run):
        if is_set:
            yield error(f"{key} cannot be combined with policies: {instead}")
    for key, taskset in config.buffer.explorer_input.explored.items():
        if ":" in taskset.workflow:
            continue
        yield error(
            f"{key}.workflow {taskset.workflow} calls only the first policy, so the policies "
            f"{', '.join(policy.name for policy in config.policies)} would learn nothing: set your own workflow"
        )


def _name_problems(config: RftConfig) -> Iterator[Finding]:
    names = [policy.name for policy in config.policies]
    auxiliary = {entry.known_as.lower() for entry in config.explorer.auxiliary_models}
    for index, name in enumerate(names):
        key = f"policies[{index}].name {name!r}"
        if names.index(name) < index:
            yield error(f"{key} is also the name of another policy; give each a unique name")
        if name == DEFAULT_POLICY:
            yield error(f"{key} is the name of the policy of section model; choose another name")
        if name in auxiliary:
            yield error(f"{key} is also the name of an auxiliary model; rename one of them")
        if name in _TAKEN or name.startswith("global_step_"):
            yield error(f"{key} is the name of a folder of checkpoints; choose another name")


_WARM_START_INSTEAD = "run its warm start in its own project and use the resulting checkpoint as model_path"


def _unsupported(run: RunSettings) -> list[tuple[str, bool, str]]:
    """One entry for each setting that several policies exclude: its key, whether it is set, and how to fix it."""
    config, preset = run.config, run.algorithm
    sync, algorithm = config.synchronizer, config.algorithm
    kind = f"algorithm.algorithm_type {algorithm.algorithm_type}"
    replay = config.buffer.trainer_input.experience_buffer.replay_buffer.enable
    return [
        (f"mode {config.mode}", config.mode not in ("both", "colocate"), "set it to both"),
        ("warm_start", config.warm_start is not None, _WARM_START_INSTEAD),
        ("model.lora_configs", bool(config.model.lora_configs), "train full weights"),
        (f"synchronizer.sync_style {sync.sync_style}", sync.dynamic, "set it to fixed"),
        ("buffer.trainer_input.experience_buffer.replay_buffer.enable", replay, "set it to false"),
        (kind, run.offline is not None, "an offline training trains one policy"),
        (kind, preset.critic, "use an algorithm without a critic"),
        (kind, preset.teacher, "use an algorithm without a teacher"),
        (kind, preset.experts, "use an algorithm without demonstrations"),
        (
            "algorithm.filters.max_batches (dynamic sampling)",
            run.batches.max_batches > 1,
            "set it to 1; of an operator dynamic_sampling, set max_batches to 1",
        ),
    ]
