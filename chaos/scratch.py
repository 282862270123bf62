"""The scratch project: a tiny untrained model, four tasks with four runs per round, rounds of about a second."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.files import write_text
from rft_platform.config.home import Home
from rft_platform.config.load import dump_config, load_config
from rft_platform.config.schema.rft_config import RftConfig

MARKER = ".rft-chaos"
PROJECT, NAME = "chaos", "scratch"
EVALUATE_EVERY = 3  # rounds
_SEED = 7
_JUDGE, _AGENT = Path(__file__).with_name("judge.py"), Path(__file__).with_name("agent.py")
#: For projects that are compared with one on Ray: the trainer's ranks there are on so many nodes.
_RANKS = 2
_WORKERS: dict[str, Any] = {"workers": {"kind": "process", "count": 2}, "max_retry_times": 5}


@dataclass(frozen=True, slots=True)
class Scratch:
    """A folder with the files that all scratch projects share, and a home for each project."""

    root: Path

    @property
    def config(self) -> Path:
        """The configuration file of every project in the folder."""
        return self.root / "rft.yaml"

    def home(self, name: str) -> Home:
        """The home of one of the projects."""
        return Home(self.root / name)

    def checkpoints(self, home: Home) -> Path:
        """The folder of a project's checkpoints."""
        return home.checkpoints / PROJECT / NAME

    def load(self, rounds: int) -> RftConfig:
        """The configuration with a budget of ``rounds`` rounds."""
        config = load_config(self.config)
        return config.model_copy(update={"buffer": config.buffer.model_copy(update={"total_steps": rounds})})

    def write_ray_config(self, name: str, address: str, store_url: str) -> Path:
        """Write the configuration of a project on the Ray cluster at ``address`` with its copy at ``store_url``."""
        import yaml

        document = yaml.safe_load(self.config.read_text(encoding="utf-8"))
        del document["trainer"]["nproc"]
        file = self.root / f"{name}.yaml"
        document |= {"cluster": {"kind": "ray", "address": address, "node_num": _RANKS}, "store_url": store_url}
        write_text(file, yaml.safe_dump(document))
        return file

    def put_in_force(self, home: Home, rounds: int) -> None:
        """Write a project's configuration, or raise its budget."""
        write_text(home.config_file, dump_config(self.load(rounds)))


def make_scratch(root: Path, workers: bool = False) -> Scratch:
    """Recreate the folder. Raises UserError if it holds anything but an earlier scratch folder.

    ``workers``: the agents run in worker processes, and the trainer has several ranks.
    """
    import yaml

    from rft_platform.recipes.tiny_model import build_model

    root = root.absolute()
    if root.exists() and any(root.iterdir()):
        if not (root / MARKER).exists():
            raise UserError(f"{root} is not empty and no scratch folder of the chaos tool: name a new one with --work")
        shutil.rmtree(root)
    write_text(root / MARKER, "a scratch folder of `python -m chaos`: everything in it may be killed and removed\n")
    shutil.copy(_JUDGE, root)
    scratch = Scratch(root)
    document = _config(root, build_model(root / "model"))
    if workers:
        shutil.copy(_AGENT, root)
        document["explorer"] = _WORKERS
        document["trainer"]["nproc"] = _RANKS
        document["buffer"]["explorer_input"]["taskset"]["workflow"] = f"{_AGENT.stem}:add"
    write_text(scratch.config, yaml.safe_dump(document))
    return scratch


def _config(root: Path, model: Path) -> dict[str, Any]:
    judge = {"judge": f"{root / _JUDGE.name}:digit_share"}
    tasks = _write_additions(root / "tasks.jsonl", [(a, b) for a in range(4) for b in range(4)])
    held_out = _write_additions(root / "held_out.jsonl", [(a, 9) for a in range(4)])
    return {
        "project": PROJECT,
        "name": NAME,
        "seed": _SEED,
        "model": {"model_path": str(model), "max_model_len": 64, "max_response_tokens": 6},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr": 1e-3}},
        "buffer": {
            "batch_size": 4,
            "train_batch_size": 8,
            "total_steps": 1,
            "explorer_input": {
                "taskset": {"path": str(tasks), **judge},
                "eval_tasksets": [{"path": str(held_out), "name": "held-out", **judge}],
            },
        },
        "evaluation": {"every": EVALUATE_EVERY, "greedy": False},
        "trainer": {"heartbeat_timeout_s": 20},
    }


def _write_additions(file: Path, pairs: list[tuple[int, int]]) -> Path:
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
    return file
