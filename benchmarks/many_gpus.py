"""Whole rounds of multi-turn rows on 2, 4 and 8 GPUs of one host: seconds, tokens, MFU, weights, memory and scaling.

``python benchmarks/many_gpus.py --out FILE`` measures every split of ``SPLITS`` that the host's GPUs permit, the
largest first: half of the GPUs serve (tensor parallelism of two, so 8 GPUs hold two engines), the other half train
(FSDP2). The model has the shape of a Qwen3 of 8 billion parameters with random weights in files of 2 GB. A task is an
agent's episode of several calls, whose rows end with 2,000 to 8,000 tokens. 128 tasks are run 8 times, and exploration
leads training by one round (``sync_offset: 1``). The state of 8B does not fit one trainer rank: give ``--lora`` or a
smaller ``--shape`` where 2 GPUs are compared.

A round has the same rows on all splits, so perfect scaling from 2 to 8 GPUs divides its seconds by 4. ``--ray`` runs
the rounds through ``cluster: {kind: ray}`` on a cluster of this one host. ``--small`` runs a tiny model on a CPU: it
checks the benchmark, not the speed. ``--tasks`` and ``--rounds`` shrink a rehearsal.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe
from round_gpu import JUDGE, Task, key_and_value, make_shape_model, project_config, run_rounds, write_config
from shape_model import SHAPES

from rft_platform.common.files import write_json
from rft_platform.recipes.tiny_model import build_model

#: An agent that reads pages: each call adds an answer of the model and a page of the task to the conversation.
AGENT = '''from rft_platform.rollout.workflow import WorkflowOutput


async def solve(task, model):
    """Read the pages of the task one after the other, and answer after each."""
    client, messages, answer = model.get_openai_async_client(), [], ""
    for page in task["pages"]:
        messages.append({"role": "user", "content": page})
        reply = await client.chat.completions.create(
            model=model.model_name, messages=messages, max_tokens=task["tokens"]
        )
        answer = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": answer})
    return WorkflowOutput(response=answer)
'''
GROUP = 8
GIB = 1024  # MiB, the unit of nvidia-smi


@dataclass(frozen=True)
class Split:
    """How the GPUs of a host are divided."""

    engines: int
    tensor_parallel: int
    ranks: int

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.engines * self.tensor_parallel + self.ranks


SPLITS = (Split(2, 2, 4), Split(1, 2, 2), Split(1, 1, 1))


@dataclass(frozen=True)
class Sizes:
    """Lengths of an episode, in tokens, and its number of turns."""

    context: int
    turns: tuple[int, int]
    page: tuple[int, int]  # words
    answer: tuple[int, int]


LARGE = Sizes(8192, (3, 8), (40, 100), (128, 640))
SMALL = Sizes(256, (2, 3), (2, 6), (8, 16))


def write_project(work: Path, split: Split, sizes: Sizes, model: Path, given: argparse.Namespace) -> None:
    """Write tasks, agent, judge and rft.yaml into ``work``."""
    work.mkdir(parents=True)
    rng = random.Random(11)
    with (work / "tasks.jsonl").open("w") as file:
        for number in range(given.tasks * given.rounds):
            turns = rng.randint(*sizes.turns)
            pages = [
                " ".join(f"{rng.randrange(100)}+{rng.randrange(100)}" for _ in range(rng.randint(*sizes.page)))
                for _ in range(turns)
            ]
            episode = {
                "question": f"task {number}",
                "pages": pages,
                "tokens": rng.randint(*sizes.answer),
                "answer": str(number),
            }
            file.write(json.dumps(episode) + "\n")
    (work / "agent.py").write_text(AGENT)
    (work / "judge.py").write_text(JUDGE)
    task = Task(f"gpus-{split.gpus}", given.tasks, GROUP, sizes.answer[1], sizes.context, repeats=(1, 1))
    taskset = {"format": {"prompt_key": None, "response_key": "answer"}, "workflow": "agent.py:solve"}
    config = project_config(task, taskset, model, given)
    config["explorer"]["runner_per_model"] = -(-given.tasks * GROUP // split.engines)
    if not given.small:
        engines = {"engine_num": split.engines, "tensor_parallel_size": split.tensor_parallel}
        config["explorer"]["rollout_model"] |= engines
    ranks = 1 if given.small else split.ranks
    config["trainer"] = {"nproc": ranks, "max_checkpoints_to_keep": 1, "save_interval": 1000}
    config["synchronizer"] = {"sync_offset": 1}
    if given.ray:
        config["cluster"] = {"kind": "ray", "address": "auto"}
    write_config(work, config, given)


class PeakMemory:
    """The largest memory in use of each of ``gpus``, sampled twice a second while the block runs."""

    def __init__(self, gpus: list[str]) -> None:
        self.gib: list[float] = []
        self._gpus, self._end = gpus, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakMemory":
        if self._gpus:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._gpus:
            self._thread.join()

    def _sample(self) -> None:
        asked = ["--id", ",".join(self._gpus), "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        command = ["nvidia-smi", *asked]
        while not self._end.wait(0.5):
            used = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            now = [round(int(each) / GIB, 1) for each in used]
            self.gib = [max(pair) for pair in zip(self.gib or now, now, strict=True)]


def visible_gpus() -> list[str]:
    """The GPUs of ``CUDA_VISIBLE_DEVICES``, or all GPUs of the host."""
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True).split()


def measure(work: Path, split: Split, model: Path, gpus: list[str], given: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds of one split on ``gpus``."""
    write_project(work, split, SMALL if given.small else LARGE, model, given)
    devices = {} if given.small else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    started = time.time()
    with PeakMemory(gpus) as peak:
        found = run_rounds(work, given.logs, {**os.environ, **devices})
    steady = found["rounds"][1 : None if found["cut_off"] else -1]
    if not steady:
        raise SystemExit(f"{split} was ended in its first round: give it more time, or fewer --tasks")
    tokens = statistics.median(each["completion_tokens"] / each["seconds"] for each in steady)
    first = found["rounds"][0]
    return {
        "split": {"engines": split.engines, "tensor_parallel_size": split.tensor_parallel, "ranks": split.ranks},
        **found,
        "completion_tokens_per_s_and_gpu": round(tokens / split.gpus, 1),
        "mfu": statistics.median(each["mfu"] for each in steady) if steady[0]["mfu"] is not None else None,
        "start_until_the_first_round_ends_s": round(first["ended_at"] - started, 1),
        "peak_gib": peak.gib,
    }


def scaling(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Share of linear scaling from the smallest measured split to each other one: 1.0 is perfect."""
    sizes = sorted(map(int, results))
    base = results[str(sizes[0])]["medians"]["seconds"] * sizes[0]
    return {str(size): round(base / (results[str(size)]["medians"]["seconds"] * size), 3) for size in sizes}


def main() -> None:
    """Measure the splits, and write the file after each."""
    given = read_options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    visible = [] if given.small else visible_gpus()
    splits = (
        SPLITS[-1:]
        if given.small
        else [split for split in SPLITS if split.gpus in given.gpus and split.gpus <= len(visible)]
    )
    if not splits:
        raise SystemExit(f"{len(visible)} GPUs are visible; the splits of {given.gpus} GPUs need more")
    result: dict[str, Any] = {
        "machine": describe("cpu" if given.small else "cuda"),
        "settings": {
            "shape": given.shape,
            "tasks": given.tasks,
            "runs_a_task": GROUP,
            "rounds": given.rounds,
            "lora_rank": given.lora or None,
            "ray": given.ray,
            "set": dict(given.set),
        },
        "gpus": {},
    }
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        model = build_model(work / "model") if given.small else make_shape_model(work / "model", given.shape)
        for split in splits:
            found = measure(work / f"gpus-{split.gpus}", split, model, visible[: split.gpus], given)
            result["gpus"][str(split.gpus)] = found
            result["share_of_linear"] = scaling(result["gpus"])
            write_json(given.out, result)
            print(split, found["medians"], flush=True)
            if found["cut_off"]:
                return


def read_options() -> argparse.Namespace:
    """The command line; the defaults are the setting of the module's docstring."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--gpus", type=int, nargs="+", default=[each.gpus for each in SPLITS])
    options.add_argument("--shape", choices=list(SHAPES), default="8b")
    options.add_argument("--tasks", type=int, default=128, help="tasks a round")
    options.add_argument("--rounds", type=int, default=4, help="three or more; the first and the last do not count")
    options.add_argument("--lora", type=int, default=0, metavar="RANK", help="train an adapter of this rank")
    options.add_argument("--set", type=key_and_value, action="append", default=[], metavar="KEY=VALUE")
    options.add_argument("--logs", type=Path, help="folder that gets the logs of the processes")
    options.add_argument("--ray", action="store_true", help="through a Ray cluster that already runs on this host")
    options.add_argument("--small", action="store_true", help="a tiny model on a CPU, one split")
    given = options.parse_args()
    if given.rounds < 3:
        options.error(f"--rounds {given.rounds}: give at least 3, because the first and the last do not count")
    return given


if __name__ == "__main__":
    main()
