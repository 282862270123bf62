"""Which nodes a service runs on, and groups of ranks on several nodes: a placement group with one bundle on each node.

A group is lost as a whole: the end of any rank ends the others, the placement group is removed with all its actors, and
the next start is a new generation. A placement group that is only partly alive could wait for ever for its other nodes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rft_platform.cluster.interface import Bundle, Service, StartError
from rft_platform.cluster.ray.connection import lost

MEMBER = "#"  # in the names of the actors of further nodes
_ENDPOINT_S = 60.0
_NODE_ID = "ray.io/node-id"  # a label that Ray gives every node


def node_selector(with_home: Sequence[str], apart: Sequence[str], service: Service) -> dict[str, Any]:
    """Options of an actor, given the ids of the nodes with the home and of those ``apart``; none without the latter.

    A service that reads the home runs where it is. Another one leaves these nodes free, if those apart have room.
    """
    if not apart:
        return {}
    beside_home, elsewhere = ({"label_selector": {_NODE_ID: f"in({','.join(ids)})"}} for ids in (with_home, apart))
    if service.reads_home:
        return dict(beside_home)
    return {**elsewhere, "fallback_strategy": [beside_home]}


def place_group(ray: Any, name: str, bundle: Bundle, service: Service, labels: Mapping[str, str] | None = None) -> Any:
    """Reserve ``bundle`` on as many nodes as the group of ``service`` has, with these ``labels``."""
    wanted = {"CPU": bundle.cpus, "GPU": bundle.gpus, **bundle.resources}
    held = {resource: amount for resource, amount in wanted.items() if amount}
    nodes = service.group.nodes
    group = ray.util.placement_group(
        [held] * nodes,
        strategy="STRICT_SPREAD",
        name=name,
        lifetime="detached",
        bundle_label_selector=[dict(labels)] * nodes if labels else None,
    )
    if not group.wait(service.start_timeout_s):
        remove_groups(ray, name)
        raise StartError(
            f"Service {service.name!r} was not placed within {service.start_timeout_s:.0f} s: {nodes} nodes with room "
            f"for {bundle} each are needed"
        )
    return group


def in_bundle(group: Any, index: int) -> dict[str, Any]:
    """The option of an actor that runs in a bundle of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)}


def start_members(
    ray: Any, new: Callable[..., Any], group: Any, name: str, service: Service, environment: Mapping[str, str]
) -> list[Any]:
    """Start the further nodes of a group, whose endpoint ``service`` names; ``new`` makes an actor with options.

    Returns their actors. Raises StartError if one cannot start its ranks.
    """
    actors = [new(name=f"{name}{MEMBER}{rank}", **in_bundle(group, rank)) for rank in range(1, service.group.nodes)]
    joins = [actor.join.remote(service, rank, environment) for rank, actor in enumerate(actors, start=1)]
    try:
        ray.get(joins, timeout=service.start_timeout_s)
    except lost(ray) as error:
        raise StartError(f"Service {service.name!r}: a node of its group was lost while it started") from error
    except OSError as error:
        raise StartError(f"Service {service.name!r}: a node of its group cannot start its ranks: {error}") from error
    return actors


def endpoint_of(ray: Any, first: Any, service: Service) -> str:
    """A host and a free port of the first node, where the nodes of the group connect."""
    try:
        endpoint: str = ray.get(first.endpoint.remote(), timeout=_ENDPOINT_S)
    except lost(ray) as error:
        raise StartError(f"Service {service.name!r}: its first node was lost while it started") from error
    return endpoint


def living_groups(ray: Any, prefix: str) -> list[str]:
    """The names of the placement groups that begin with ``prefix`` and are not removed."""
    table = ray.util.placement_group_table().values()
    return [group["name"] for group in table if group["name"].startswith(prefix) and group["state"] != "REMOVED"]


def remove_groups(ray: Any, prefix: str, generation: int | None = None) -> None:
    """Remove the placement groups whose name begins with ``prefix``, with all their actors.

    With ``generation`` only that one, whose name ends with it.
    """
    for name in living_groups(ray, prefix):
        if generation is None or name == f"{prefix}{generation}":
            with suppress(ValueError):
                ray.util.remove_placement_group(ray.util.get_placement_group(name))
