"""Run a further node of a trainer group with several nodes. Start it on each but the first, with one configuration::

    python -m rft_platform.training.join --config rft.yaml --node-rank 1

The program waits for the first node, serves until the group ends, and waits again: the control plane starts a group
when it needs one, and a group ends when it is idle. Ctrl-C ends the program.
"""

import argparse
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rft_platform.common.errors import UserError
from rft_platform.config.gpu_placement import gpu_count
from rft_platform.config.load import load_config
from rft_platform.config.memory_plan import choose_memory, gpu_bytes
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.training.launch import TrainerSpec, command, configured_layout, configured_rendezvous

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
    line = node_command(load_config(options.config), options.node_rank, Path(tempfile.gettempdir()))
    while True:
        LOG.info("waiting for the trainer group: %s", " ".join(line))
        code = subprocess.run(line, check=False, env=os.environ).returncode
        LOG.info("the group ended (exit code %d)", code)
        if options.once:
            raise SystemExit(code)
        time.sleep(_PAUSE_S)


def node_command(config: RftConfig, node_rank: int, scratch: Path) -> list[str]:
    """Return the command line of a further node. Raises UserError if the configuration has no such node."""
    rendezvous, settings = configured_rendezvous(config), config.trainer
    if not 0 < node_rank < rendezvous.nodes:
        raise UserError(
            f"node rank {node_rank}: with cluster.node_num {config.cluster.node_num} and trainer.rendezvous.endpoint "
            f"{rendezvous.endpoint!r}, expected a node rank from 1 to {rendezvous.nodes - 1}"
        )
    gpus = gpu_count()
    memory = choose_memory(resolve(config), gpus, gpu_bytes() if gpus else None)
    spec = TrainerSpec(
        scratch, scratch, settings.nproc, settings.threads, settings.dtype, "auto", settings.idle_timeout_s,
        configured_layout(config, memory), rendezvous,
    )  # fmt: skip
    return command(spec, node_rank)


if __name__ == "__main__":
    main()
