"""What a project starts on the nodes of a Ray cluster, and which nodes have room for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from rft_platform.cluster.interface import Bundle, Node
from rft_platform.config.gpu_placement import ONLINE_ENGINES, engine_gpus, engine_share
from rft_platform.config.schema.rft_config import RftConfig


@dataclass(frozen=True, slots=True)
class Demand:
    """Processes that a project starts on the cluster."""

    what: str
    key: str  # the configuration key that changes it
    bundle: Bundle  # of each of them
    count: int = 1
    apart: bool = False  # each on another node
    reads_home: bool = False  # on nodes that see the home of the project

    def fits(self, node: Node) -> bool:
        """Whether the node can hold one of the processes."""
        return node.holds(self.bundle) and (node.has_home or not self.reads_home)


def gpus_of(nodes: Sequence[Node]) -> int:
    """Number of GPUs of all nodes."""
    return int(sum(node.gpus for node in nodes))


def demands(config: RftConfig, gpus: int, online_engines: Sequence[str] = ()) -> list[Demand]:
    """What a project starts on a cluster with ``gpus`` GPUs, with some of the ``ONLINE_ENGINES``."""
    found = []
    share, explorer = engine_share(config, gpus), config.explorer
    if config.mode != "train" and not config.engine.urls:
        engine = Bundle(config.engine.threads, gpus=share)
        key = "explorer.rollout_model.tensor_parallel_size"
        found.append(Demand("engine", key, engine, explorer.rollout_model.engine_num))
        others = {name for name, _ in engine_gpus(config)} & {entry.lease for entry in config.policies}
        found += [Demand(name, key, engine) for name in [*sorted(others), *online_engines]]
    for model in explorer.auxiliary_models:
        if not model.base_url:
            own = Bundle(config.engine.threads, gpus=engine_share(config, gpus, model.lease))
            found.append(Demand(model.lease, "explorer.auxiliary_models", own, model.engine_num))
    if config.trains:
        rank = Bundle(config.trainer.threads, gpus=float(gpus > 0))
        nodes = config.cluster.node_num
        ranks = rank.times(config.trainer.nproc)
        found.append(Demand("trainer", "trainer.nproc", ranks, nodes, apart=True, reads_home=True))
    if explorer.workers.kind == "process" and config.mode != "train":
        worker = Bundle(explorer.workers.cpus, resources=explorer.workers.resources)
        found.append(Demand("worker", "explorer.workers", worker))
    return found


def placed(nodes: Sequence[Node], wanted: Sequence[Demand]) -> tuple[dict[str, list[str]], list[Demand]]:
    """The nodes that could hold each demand, all at once; and the demands without room.

    The trainer is placed first, then the largest of the others.
    """
    free = {node.name + f"#{number}": node for number, node in enumerate(nodes)}
    where: dict[str, list[str]] = {}
    unplaced = []
    for demand in sorted(wanted, key=lambda each: (not each.reads_home, -each.bundle.gpus, -each.bundle.cpus)):
        own: list[str] = []
        for _ in range(demand.count):
            fits = [name for name, node in free.items() if demand.fits(node)]
            chosen = next((name for name in fits if not (demand.apart and name in own)), None)
            if chosen is None:
                unplaced.append(demand)
                break
            free[chosen] = free[chosen].without(demand.bundle)
            own.append(chosen)
        where[demand.what] = [name.partition("#")[0] for name in own]
    return where, unplaced


def holds_online_engine(config: RftConfig, nodes: Sequence[Node], name: str) -> bool:
    """Whether the nodes have room for one of the ``ONLINE_ENGINES`` beside all else of the project.

    The two commands of an online project that is served and trained apart get the same answer.
    """
    whole = config.model_copy(update={"mode": "both"})
    up_to = ONLINE_ENGINES[: ONLINE_ENGINES.index(name) + 1]
    return not placed(nodes, demands(whole, gpus_of(nodes), up_to))[1]
