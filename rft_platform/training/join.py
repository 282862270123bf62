"""Run a further node of a trainer group with several nodes. Start it on each but the first, with one configuration::

    python -m rft_platform.training.join --config rft.yaml --node-rank 1

The program waits for the first node, serves until the group ends, and waits again: the control plane starts a group
when it needs one, and a group ends when it is idle. Ctrl-C ends the program.
"""

import argparse
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from rft_platform.cluster.interface import Service
from rft_platform.cluster.local.local_cluster import command_of, run_node
from rft_platform.common.errors import UserError
from rft_platform.config.gpu_placement import gpu_count
from rft_platform.config.load import load_config
from rft_platform.config.memory_plan import choose_memory, gpu_bytes
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.training.launch import configured_service

LOG = logging.getLogger("rft_platform.training.join")
_PAUSE_S = 2.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve one group after another until interrupted."""
    parser = argparse.ArgumentParser(prog="rft_platform.training.join", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--node-rank", type=int, required=True, help="1 .. cluster.node_num - 1")
    parser.add_argument("--once", action="store_true", help="exit when the first group ends")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    service = node_service(load_config(options.config), options.node_rank)
    while True:
        LOG.info("waiting for the trainer group: %s", " ".join(command_of(service, options.node_rank)))
        code = run_node(service, options.node_rank)
        LOG.info("the group ended (exit code %d)", code)
        if options.once:
            raise SystemExit(code)
        time.sleep(_PAUSE_S)


def node_service(config: RftConfig, node_rank: int) -> Service:
    """The group that a further node belongs to. Raises UserError if the configuration has no such node."""
    if config.cluster.kind == "ray":
        raise UserError(
            "cluster.kind is ray: Ray starts the trainer on every node; add this machine to the Ray cluster instead"
        )
    if config.trainer_nodes == 1:
        raise UserError(
            f"cluster.node_num is {config.cluster.node_num} and trainer.rendezvous.endpoint is "
            f"{config.trainer.rendezvous.endpoint!r}, so only the first node trains: set cluster.node_num to the "
            "number of nodes and trainer.rendezvous.endpoint to HOST:PORT of the first node"
        )
    gpus = gpu_count()
    memory = choose_memory(resolve(config), gpus, gpu_bytes() if gpus else None)
    service = configured_service(config, memory, None)
    if not 0 < node_rank < service.group.nodes:
        raise UserError(
            f"node rank {node_rank}: with cluster.node_num {config.cluster.node_num}, expected a node rank from 1 to "
            f"{service.group.nodes - 1}"
        )
    return service


if __name__ == "__main__":
    main()
