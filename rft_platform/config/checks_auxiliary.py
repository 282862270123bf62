"""Checks of ``explorer.auxiliary_models``: each entry is either served here or elsewhere, and has a unique name."""

from collections.abc import Iterator

from rft_platform.config.explorer import AuxiliaryModel, RolloutModel
from rft_platform.config.schema import RftConfig

#: Keys of a model that the platform serves. They have no effect on a model that is served elsewhere.
_OF_SERVING = sorted((set(RolloutModel.model_fields) - {"enable_thinking"}) | {"max_model_len"})


def auxiliary_problems(config: RftConfig) -> Iterator[str]:
    """One line for each entry with missing or conflicting keys, and for each name that two entries share."""
    entries = config.explorer.auxiliary_models
    for index, entry in enumerate(entries):
        yield from _problems(f"explorer.auxiliary_models[{index}]", entry)
    leases = [lease for entry in entries for lease in _leases(entry)]
    shared = {entry.known_as for entry in entries if any(leases.count(lease) > 1 for lease in _leases(entry))}
    for name in sorted(shared):
        yield (
            f"explorer.auxiliary_models: {name!r} is not the name of one model alone (only letters, digits, - and _ "
            "tell names apart); give each a name of its own"
        )


def _problems(key: str, entry: AuxiliaryModel) -> Iterator[str]:
    if not entry.model_path and not entry.base_url:
        yield f"{key}: neither model_path nor base_url is set; give a model to serve, or where one is served already"
    if entry.base_url is None:
        for name in ("model", "api_key_env"):
            if getattr(entry, name) is not None:
                yield f"{key}.{name} is only for a model that is served elsewhere: set base_url, or leave it out"
        return
    if entry.model_path:
        yield f"{key}: model_path and base_url are both set; leave out the one that you do not mean"
    if not entry.base_url.startswith(("http://", "https://")):
        yield f"{key}.base_url {entry.base_url!r}: expected the root of an OpenAI-compatible API, as in https://host/v1"
    if not entry.model:
        yield f"{key}.model is not set: {entry.base_url} must be told which of its models is meant"
    written = [name for name in _OF_SERVING if name in entry.model_fields_set and _differs(entry, name)]
    if written:
        yield f"{key}: {', '.join(written)} cannot be set for a model that is served elsewhere; leave it out"


def _differs(entry: AuxiliaryModel, name: str) -> bool:
    return bool(getattr(entry, name) != AuxiliaryModel.model_fields[name].get_default())


def _leases(entry: AuxiliaryModel) -> list[str]:
    """Lease names of the entry's engines; for a model that is served elsewhere, the name that its lease would have."""
    further = 0 if entry.base_url else entry.engine_num - 1
    return [entry.lease, *(f"{entry.lease}-{number + 1}" for number in range(further))]
