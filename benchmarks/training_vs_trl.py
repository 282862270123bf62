"""Training beside TRL on the CPU: seconds an optimiser step, interleaved in one run, each side at its best setting.

- GRPO on 256 completions (32 tasks, 8 runs each, at most 6 tokens, beta 0, one update a rollout batch): the whole step
  (generation, reward, training) and the training alone; on 1 million and on 10 million parameters.
- SFT on 256 samples and DPO on 128 pairs an update (the reference's log-probs are part of the time).
- Peak memory of the process that trains; on both sides the generator lives in it.

Both sides start from the same weights and read the same tasks. The settings tried are one thread or two, float32 or
bfloat16; a short trial of each chooses a side's best for each task. Then both live side by side, and are told in turn
to run some steps, so that a drift of the machine hits both. On 1 million parameters the reward is the exact answer from
the peers' warm start: groups whose rewards are all equal carry no gradient, which our trainer makes use of. On 10
million, where the warm start below is short, it is the distance to the answer, so that nearly every row is trained on.

Needs the peer's data (``RFT_TEST_DATA/peers``) and a Python with TRL 1.16 (``--peer-python``).
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from machine import describe

HERE = Path(__file__).resolve().parent
#: Threads and bfloat16 that each side tries. Ours stays in float32: in bfloat16 on a CPU oneDNN keeps kernels for every
#: shape of a matrix, packs have a new shape each step, and memory grows by some 40 MB in four steps.
SETTINGS = {"trl": ((1, 0), (2, 0), (1, 1), (2, 1)), "ours": ((1, 0), (2, 0))}
WARM_STEPS = {"10m": 80}  # optimiser steps of supervised warm start


@dataclass(frozen=True, slots=True)
class Comparison:
    """One task, and what our time may be as a share of TRL's."""

    what: str
    size: str
    batch: int
    unit: str
    goals: dict[str, float]
    graded: int = 0


COMPARISONS = {
    "grpo-1m": Comparison("grpo", "1m", 256, "completions", {"whole": 0.5, "training": 0.5}),
    "grpo-10m": Comparison("grpo", "10m", 256, "completions", {"whole": 0.67, "training": 0.67}, graded=1),
    "sft-1m": Comparison("sft", "1m", 256, "samples", {"whole": 1 / 1.4}),
    "dpo-1m": Comparison("dpo", "1m", 128, "pairs", {"whole": 1 / 2}),
    "sft-10m": Comparison("sft", "10m", 256, "samples", {"whole": 1 / 1.4}),
    "dpo-10m": Comparison("dpo", "10m", 128, "pairs", {"whole": 1 / 2}),
}


class Side:
    """A trainer in its own process."""

    def __init__(self, command: list[str], threads: int) -> None:
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, **quiet},
        )  # fmt: skip
        self._command = command
        self._answer()

    def run(self, steps: int) -> dict[str, Any]:
        """Seconds a step, and what else the side tells."""
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        answer = self._answer()
        found = {"whole": answer["seconds"] / steps, "peak_rss_mb": answer["peak_rss_mb"]}
        if answer.get("generation_and_scoring"):
            found["training"] = (answer["seconds"] - answer["generation_and_scoring"]) / steps
        if "computed_share" in answer:
            found["computed_share"] = answer["computed_share"]
        return {name: round(value, 4) for name, value in found.items()}

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self._command)}: ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True, slots=True)
class Bench:
    """Where everything is."""

    python: dict[str, str]  # by side
    models: dict[str, Path]  # by size
    data: Path
    work: Path

    @contextmanager
    def side(self, side: str, task: Comparison, setting: tuple[int, int]) -> Iterator[Side]:
        """A side started for ``task``."""
        threads, bf16 = setting
        script = HERE / ("our_side.py" if side == "ours" else "trl_side.py")
        options = {
            "model": self.models[task.size], "data": self.data, "work": self.work / side, "threads": threads,
            "bf16": bf16, "batch": task.batch, "lr": 1e-5, "graded": task.graded,
        }  # fmt: skip
        command = [self.python[side], str(script), task.what]
        command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        started = Side(command, threads)
        try:
            yield started
        finally:
            started.close()

    def best_setting(self, side: str, task: Comparison, steps: int) -> tuple[tuple[int, int], dict[str, float]]:
        """The setting whose whole step is fastest in a short trial, and all the trials."""
        trials: dict[tuple[int, int], float] = {}
        for setting in SETTINGS[side]:
            with self.side(side, task, setting) as running:
                running.run(1)
                trials[setting] = min(running.run(steps)["whole"] for _ in range(2))
        return min(trials, key=trials.__getitem__), {_name(setting): trials[setting] for setting in trials}

    def compare(self, task: Comparison, repeats: int, steps: int, fixed: tuple[int, int] | None) -> dict[str, Any]:
        """Both sides in turn."""
        chosen: dict[str, tuple[int, int]] = {}
        trials: dict[str, Any] = {}
        for side in ("trl", "ours"):
            chosen[side], trials[side] = (fixed, {}) if fixed else self.best_setting(side, task, steps)
        blocks: dict[str, list[dict[str, Any]]] = {"trl": [], "ours": []}
        with self.side("trl", task, chosen["trl"]) as theirs, self.side("ours", task, chosen["ours"]) as ours:
            sides = {"trl": theirs, "ours": ours}
            for running in sides.values():
                running.run(2)
            for repeat in range(repeats):
                for name in ("trl", "ours") if repeat % 2 else ("ours", "trl"):
                    blocks[name].append(sides[name].run(steps))
        settings = {side: {"chosen": _name(chosen[side]), "trials_s": trials[side]} for side in chosen}
        return {"settings": settings} | report(task, blocks)


def _name(setting: tuple[int, int]) -> str:
    return f"{setting[0]} threads, {'bfloat16' if setting[1] else 'float32'}"


def report(task: Comparison, blocks: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, ratios and goals."""
    medians = {
        side: {name: median(block[name] for block in of_side) for name in of_side[0]}
        for side, of_side in blocks.items()
    }
    ratio = {name: round(medians["ours"][name] / medians["trl"][name], 3) for name in task.goals}
    memory = {side: max(block["peak_rss_mb"] for block in of_side) for side, of_side in blocks.items()}
    return {
        "task": {name: value for name, value in asdict(task).items() if name != "goals"},
        "median_s": medians,
        "rate": {side: round(task.batch / medians[side]["whole"], 1) for side in medians},
        "ours_to_trl": ratio,
        "goal": {name: round(goal, 3) for name, goal in task.goals.items()},
        "reached": {name: ratio[name] <= goal for name, goal in task.goals.items()},
        "peak_rss_mb": memory,
        "memory_reached": memory["ours"] <= memory["trl"],
        "blocks": blocks,
    }


def write_data(source: Path, target: Path) -> Path:
    """The training tasks, each with a wrong answer near the right one."""
    draw = random.Random(0)
    near = [-11, -10, -9, -2, -1, 1, 2, 9, 10, 11]
    rows = []
    for line in source.read_text().splitlines():
        row = json.loads(line)
        others = [str(max(0, int(row["answer"]) + by)) for by in near]
        rows.append(row | {"rejected": draw.choice([other for other in others if other != row["answer"]])})
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return target


def warm_model(size: str, data: Path, work: Path) -> Path:
    """A model of ``size`` that answers with numbers: random weights and a few steps of SFT by our trainer."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rft_platform.algorithms.spec import AlgorithmSpec, OptimizerSpec
    from rft_platform.recipes.tiny_model import build_model
    from rft_platform.training.distributed import Ranks
    from rft_platform.training.loop.session import TrainingSession
    from rft_platform.training.protocol import TrainRequest

    steps, target = WARM_STEPS[size], work / f"warm-{size}"
    found = target / f"global_step_{steps}"
    if (found / "config.json").exists():
        return found
    tasks = [json.loads(line) for line in data.read_text().splitlines()]
    order = np.random.default_rng(0).permutation(len(tasks))
    columns = {"prompt": "question", "response": "answer"}
    pq.write_table(pa.table({c: [tasks[i][k] for i in order] for c, k in columns.items()}), work / "warm.parquet")
    request = TrainRequest(
        parent=str(build_model(work / f"random-{size}", size=size)), parent_version=0, output=str(target),
        algorithm=AlgorithmSpec(policy_loss="sft"), demonstrations=str(work / "warm.parquet"),
        optimizer=OptimizerSpec(lr=1e-3, lr_warmup_steps=10), train_batch_size=128, max_steps=steps,
    )  # fmt: skip
    ranks = Ranks.join("cpu")
    TrainingSession(ranks, "float32").train(request, lambda event: None, lambda: False)
    ranks.leave()
    return found


def main() -> None:
    """Compare and write the result after each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(os.environ.get("RFT_TEST_DATA", "")) / "peers")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--only", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="optimiser steps a turn")
    parser.add_argument("--fixed", type=int, nargs=2, metavar=("THREADS", "BF16"), help="no trials: both sides so")
    parser.add_argument("--work", type=Path, default=Path("training-vs-trl"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "training_vs_trl.json")
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    data = write_data(given.peers / "arithmetic" / "train.jsonl", work / "tasks.jsonl")
    models = {"1m": given.peers.resolve() / "arithmetic" / "warm1m"}
    if any(COMPARISONS[name].size == "10m" for name in given.only):
        models["10m"] = warm_model("10m", data, work)
    bench = Bench({"ours": sys.executable, "trl": given.peer_python}, models, data, work)
    result = {
        "what": "seconds an optimiser step, ours beside TRL 1.16, interleaved; each at its best setting",
        "machine": describe(),
        "settings": {"repeats": given.repeats, "steps_a_turn": given.steps, "lr": 1e-5, "warm_steps": WARM_STEPS},
        "results": {},
    }
    if given.out.exists():
        result["results"] = json.loads(given.out.read_text())["results"]
    for name in given.only:
        found = bench.compare(COMPARISONS[name], given.repeats, given.steps, given.fixed and tuple(given.fixed))
        result["results"][name] = found | {"load_after": describe()["load_1_min"]}
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps({name: {k: found[k] for k in ("median_s", "ours_to_trl", "peak_rss_mb")}}), flush=True)


if __name__ == "__main__":
    main()
