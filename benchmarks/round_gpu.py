"""Whole GRPO rounds on GPUs through ``rft run``, beside TRL with Liger on the same host.

``python benchmarks/round_gpu.py --out FILE`` (``make bench-gpu``) runs two tasks. *even*: prompts of about 60 tokens,
answers of 512. *uneven*: prompts of 60 to 1,000 tokens, answers of 1 to 1,024 that end by chance. The model has the
shape of a Qwen3 of 0.6, 4 or 8 billion parameters (``--shape``) with random weights. Our round holds everything:
rollouts with text, reward and Parquet of every answer, judging, training, publishing, the weights in vLLM, and Dagster.
It is measured from the end of the round before to its own end. The first round compiles, the last one saves its state
at once, and with ``--offset 1`` has no exploration beside it, so both are left out of the medians; so is the peer's
first step. After Ctrl-C or SIGTERM, as by ``timeout``, the file has the rounds that were complete.

With two GPUs visible, engine and trainer use one each. With ``--ranks 2`` (``mode: colocate``) the trainer uses both,
and the engine shares one of them. ``--lora RANK`` trains an adapter instead of the full weights, and ``--set
KEY=VALUE`` sets any key of rft.yaml.

The peer is ``trl_gpu_side.py`` in an interpreter that has TRL, vLLM and Liger (``--peer-python``; ``--no-peer`` leaves
it out). ``--beside`` runs it at the same time on the second of two GPUs, otherwise it runs after our side. ``--small``
runs a tiny model and the embedded engine on a CPU: it checks the benchmark, not the speed.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe
from shape_model import SHAPES

from rft_platform.common.files import read_json, write_json
from rft_platform.recipes.tiny_model import build_model

ENDS = range(100_000, 100_255)  # of 151,936 ids: a random model ends an answer after about 600 tokens
JUDGE = '''import zlib


def judge(task: dict, response: str) -> float:
    """A reward that costs nothing and differs within a group."""
    return float(zlib.crc32(response[:64].encode()) % 7)
'''
PEER = Path(__file__).parent / "trl_gpu_side.py"
#: Rows a batch of the peer, found by trial on a GPU of 80 GB: twice as many do not fit.
PEER_ROWS = {("0.6b", "even"): 32, ("0.6b", "uneven"): 8, ("4b", "even"): 8, ("4b", "uneven"): 4}


@dataclass(frozen=True)
class Task:
    """Sizes of one task."""

    name: str
    tasks: int
    group: int
    new_tokens: int
    context: int
    repeats: tuple[int, int]  # of the question within a prompt


TASKS = {
    "even": Task("even", 64, 8, 512, 1024, (4, 4)),
    "uneven": Task("uneven", 64, 8, 1024, 2560, (4, 60)),
}
SMALL = {"even": Task("even", 8, 4, 24, 256, (1, 1)), "uneven": Task("uneven", 8, 4, 48, 256, (1, 6))}


def write_project(work: Path, task: Task, model: Path, given: argparse.Namespace) -> None:
    """Write tasks, judge and rft.yaml into ``work``."""
    work.mkdir(parents=True)
    rng = random.Random(7)
    with (work / "tasks.jsonl").open("w") as file:
        for number in range(task.tasks * given.rounds):
            question = f"what is the sum of {number} and {number * 7 % 13}? " * rng.randint(*task.repeats)
            file.write(json.dumps({"question": question, "answer": str(number)}) + "\n")
    (work / "judge.py").write_text(JUDGE)
    taskset = {"format": {"prompt_key": "question", "response_key": "answer"}, "workflow": "single_turn"}
    config = project_config(task, taskset, model, given) | {
        **({"mode": "colocate"} if given.ranks > 1 else {}),  # engine and trainer share GPUs
        "trainer": {"nproc": given.ranks, "max_checkpoints_to_keep": 1, "save_interval": given.save_interval},
        "synchronizer": {"sync_offset": given.offset},
    }
    write_config(work, config, given)


def project_config(task: Task, taskset: dict[str, Any], model: Path, given: argparse.Namespace) -> dict[str, Any]:
    """What the projects of this benchmark and of ``many_gpus.py`` have in common of rft.yaml."""
    return {
        "project": "bench",
        "name": task.name,
        "seed": 1,
        "model": {
            "model_path": str(model),
            "max_model_len": task.context,
            "max_response_tokens": task.new_tokens,
            "temperature": 1.0,
            **({"lora_configs": [{"lora_rank": given.lora, "lora_alpha": given.lora}]} if given.lora else {}),
        },
        "algorithm": {"algorithm_type": "grpo", "repeat_times": task.group, "optimizer": {"lr": 1e-6}},
        "buffer": {
            "batch_size": task.tasks,
            "train_batch_size": task.tasks * task.group,
            "total_steps": given.rounds,
            "explorer_input": {"taskset": {"path": "tasks.jsonl", "judge": "judge.py:judge", **taskset}},
        },
        "explorer": {
            "runner_per_model": task.tasks * task.group,
            "eval_on_startup": False,
            "rollout_model": {} if given.small else {"dtype": "bfloat16"},
        },
        "engine": {"kind": "transformers" if given.small else "vllm"},
        "evaluation": {"every": 1000},
    }


def write_config(work: Path, config: dict[str, Any], given: argparse.Namespace) -> None:
    """Write rft.yaml into ``work``, with the keys of ``--set``."""
    for key, value in given.set:
        *sections, name = key.split(".")
        section = config
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
    (work / "rft.yaml").write_text(yaml.safe_dump(config))


def key_and_value(text: str) -> tuple[str, Any]:
    """``trainer.nproc=2`` as a key of rft.yaml and a value of YAML."""
    key, _, value = text.partition("=")
    return key, yaml.safe_load(value)


def make_shape_model(folder: Path, shape: str) -> Path:
    """Write the model in a process of its own, whose GPU memory is free again when it ends."""
    script = Path(__file__).with_name("shape_model.py")
    subprocess.run([sys.executable, str(script), str(folder), shape], check=True, stdout=subprocess.DEVNULL)
    return folder


def with_chance_ends(model: Path, target: Path) -> Path:
    """A copy of ``model`` whose answers end by chance."""
    shutil.copytree(model, target)
    config = read_json(target / "generation_config.json")
    ends = config["eos_token_id"]
    write_json(
        target / "generation_config.json",
        {**config, "eos_token_id": [*(ends if isinstance(ends, list) else [ends]), *ENDS]},
    )
    return target


def run_rounds(work: Path, logs: Path | None, environment: dict[str, str]) -> dict[str, Any]:
    """Drive the project in ``work``; seconds and throughput of each round, and the medians of the steady ones."""
    home = work / "home"
    environment = {**environment, "RFT_HOME": str(home)}
    rft = [sys.executable, "-m", "rft_platform"]
    started, cut_off = time.perf_counter(), False
    try:
        subprocess.run([*rft, "run", "--config", "rft.yaml"], cwd=work, env=environment, check=True)
    except KeyboardInterrupt:
        cut_off = True
    finally:
        wall_s = time.perf_counter() - started
        subprocess.run([*rft, "stop"], env=environment, check=False)
        if logs is not None and (home / "logs").exists():
            shutil.copytree(home / "logs", logs / work.name, dirs_exist_ok=True)
    shown = subprocess.run([*rft, "rounds", "--json"], env=environment, check=True, capture_output=True, text=True)
    numbered = [entry for entry in json.loads(shown.stdout)["rounds"] if entry["round"] > 0]
    rounds = [describe_round(home, entry) for entry in numbered if _is_complete(home, entry["round"])]
    for before, current in pairwise(rounds):
        current["seconds"] = round(current["ended_at"] - before["ended_at"], 2)
        current["completion_tokens_per_s"] = round(current["completion_tokens"] / current["seconds"])
    steady = rounds[1:] if cut_off else rounds[1:-1]
    names = (
        "seconds",
        "completion_tokens_per_s",
        "rollout_tokens_per_s",
        "training_tokens_per_s",
        "save_s",
        "deploy_s",
    )
    return {
        "wall_s": round(wall_s, 1),
        "cut_off": cut_off,
        "rounds": rounds,
        "medians": {name: statistics.median(each[name] for each in steady) for name in names} if steady else {},
        "recompiled_s": max((each["compile_s"] for each in steady), default=None),
    }


def _is_complete(home: Path, number: int) -> bool:
    return (home / "rounds" / f"r{number:04d}" / "evaluation.json").exists()


def describe_round(home: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """The split of one round, from its notes and rows."""
    folder = home / "rounds" / f"r{entry['round']:04d}"
    trained, evaluated = read_json(folder / "train-policy.json"), read_json(folder / "evaluation.json")
    rows = [row for file in folder.glob("rollouts/*.parquet") for row in _token_counts(file)]
    answers, phases = sum(count for _, count in rows), trained["seconds"]
    computing = phases["forward_backward"] + phases["optimizer"]
    if not computing:
        raise SystemExit(f"{folder}: nothing was trained, because the rewards of every group are equal")
    return {
        "round": entry["round"],
        "ended_at": (folder / "evaluation.json").stat().st_mtime,
        "split": {name: round(value, 2) for name, value in entry["seconds"].items()},
        "completion_tokens": answers,
        "rollout_tokens_per_s": round(entry["tokens_per_s"]),
        "training_tokens_per_s": round(sum(prompt + count for prompt, count in rows) / computing),
        "mfu": trained["metrics"].get("mfu"),
        "compile_s": round(phases["compile"], 2),
        "save_s": round(phases["save"], 2),
        "deploy_s": round(evaluated["metrics"]["deploy_s"], 2),
        "canary_delta": evaluated["metrics"].get("canary_delta"),
        "engine_mismatch": trained["engine_mismatch"],
        "mismatch_k3": trained["metrics"].get("mismatch_k3"),
    }


def _token_counts(file: Path) -> list[tuple[int, int]]:
    table = pq.read_table(file, columns=["prompt_ids", "response_ids"])
    return [
        (len(prompt), len(answer))
        for prompt, answer in zip(table["prompt_ids"].to_pylist(), table["response_ids"].to_pylist(), strict=True)
    ]


class Peer:
    """The peer's steps on the same task; its script prints one JSON line at the end."""

    def __init__(self, python: str, task: Task, model: Path, given: argparse.Namespace, environment: dict[str, str]):
        rows = given.peer_rows or PEER_ROWS[given.shape, task.name]
        sizes = {
            "steps": given.peer_steps or given.rounds,
            "group": task.group,
            "prompts": task.tasks,
            "new-tokens": task.new_tokens,
            "context": task.context,
        }
        options = {
            "model": model,
            "rows": rows,
            "lora": given.lora,
            "repeats": "-".join(map(str, task.repeats)),
            **sizes,
        }
        command = [python, str(PEER), *(f"--{name}={value}" for name, value in options.items())]
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def result(self, cut_off: bool) -> dict[str, Any]:
        """Wait for its end; the first step compiles and is left out of the median.

        ``cut_off``: our side was ended early, so end the peer too and take its complete steps.
        """
        if cut_off:
            self._process.terminate()
        output, _ = self._process.communicate()
        if self._process.returncode:
            return {"failed": self._process.returncode}
        found: dict[str, Any] = json.loads(output.splitlines()[-1])
        steady = found["step_s"][1:]
        return {**found, **({"median_step_s": statistics.median(steady)} if steady else {})}


def main() -> None:
    """Run both sides of every task, and write the file."""
    given = read_options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result: dict[str, Any] = {
        "machine": describe("cpu" if given.small else "cuda"),
        "settings": {
            "shape": given.shape,
            "rounds": given.rounds,
            "offset": given.offset,
            "ranks": given.ranks,
            "save_interval": given.save_interval,
            "lora_rank": given.lora or None,
            "set": dict(given.set),
            "beside": given.beside,
        },
        "tasks": {},
    }
    ours, theirs = ({**os.environ, "CUDA_VISIBLE_DEVICES": gpu} if given.beside else dict(os.environ) for gpu in "01")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        model = build_model(work / "model") if given.small else make_shape_model(work / "model", given.shape)
        for name in given.tasks:
            task = (SMALL if given.small else TASKS)[name]
            uneven = name == "uneven" and not given.small
            weights = with_chance_ends(model, work / "model-uneven") if uneven else model
            write_project(work / name, task, weights, given)
            peer = Peer(given.peer_python, task, weights, given, theirs) if given.beside else None
            found = run_rounds(work / name, given.logs, ours)
            if peer is None and not (given.no_peer or given.small or found["cut_off"]):
                peer = Peer(given.peer_python, task, weights, given, theirs)
            if peer is not None:
                found["peer"] = peer.result(found["cut_off"])
                if "median_step_s" in found["peer"] and found["medians"]:
                    found["times_faster"] = round(found["peer"]["median_step_s"] / found["medians"]["seconds"], 2)
            result["tasks"][name] = found
            print(name, found["medians"], found.get("times_faster", ""), flush=True)
            write_json(given.out, result)
            if found["cut_off"]:
                return


def read_options() -> argparse.Namespace:
    """The command line; the defaults fit one GPU of 80 GB."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    options.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    options.add_argument("--rounds", type=int, default=5, help="three or more; the first and the last do not count")
    options.add_argument("--peer-python", default=sys.executable)
    options.add_argument("--peer-rows", type=int, help="rows a batch of the peer")
    options.add_argument("--peer-steps", type=int, help="steps of the peer; default: as many as our rounds")
    options.add_argument("--offset", type=int, default=0, help="rounds that exploration leads training")
    options.add_argument("--ranks", type=int, default=1, help="trainer ranks")
    options.add_argument("--save-interval", type=int, help="rounds between two saves of the trainer state; default: 1")
    options.add_argument("--lora", type=int, default=0, metavar="RANK", help="train an adapter of this rank")
    options.add_argument("--set", type=key_and_value, action="append", default=[], metavar="KEY=VALUE")
    options.add_argument("--logs", type=Path, help="folder that gets the logs of the processes")
    options.add_argument("--beside", action="store_true", help="our side on GPU 0, the peer on GPU 1, at the same time")
    options.add_argument("--no-peer", action="store_true")
    options.add_argument("--small", action="store_true", help="a tiny model on a CPU, without the peer")
    given = options.parse_args()
    if given.rounds < 3:
        options.error(f"--rounds {given.rounds}: give at least 3, because the first and the last do not count")
    if given.beside and given.no_peer:
        options.error("--beside runs the peer, --no-peer leaves it out: give one of them")
    return given


if __name__ == "__main__":
    main()
