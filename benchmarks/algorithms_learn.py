"""Every algorithm learns: additions below 100 from one warm start, each preset on data that fits it, by several seeds.

A light loop in one process: the embedded engine's decode loop, the judge, the preset's advantages and filters, and the
trainer's session on Parquet files, with checkpoints, as in a round; no control plane. What is measured before and after
is on held-out tasks at temperature 1:

- the share of answers that pass (exact answer and end token);
- for pairs, the share in which the right answer is likelier than the wrong one, the share in which training moved the
  two apart the right way (DPO's reward accuracy; a tie counts half), and the mean log-prob margin;
- for distillation, the KL to the teacher in nats a token, on answers of the policy's own. The teacher is the warm start
  after some more supervised steps.

Algorithms are read from the presets: a new one joins by itself. Every (algorithm, seed) is a process of its own and
leaves a file in ``--work``, so that what was ended goes on where it stopped; ``--jobs`` of them run at a time, one
thread each. At the end the table between the marks of ``docs/algorithms.md`` is written anew.

Needs the peer's model and data (``RFT_TEST_DATA/peers``).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from in_process import Rollout, Sampler
from machine import describe

from rft_platform.algorithms.presets import PRESETS
from rft_platform.algorithms.spec import AlgorithmSpec, CriticSpec, OptimizerSpec
from rft_platform.common.files import digest_json
from rft_platform.config.load import build_config
from rft_platform.config.resolve import resolve
from rft_platform.config.training_specs import optimizer_spec
from rft_platform.experience.record import RolloutRow, row_id
from rft_platform.experience.store import ExperienceStore
from rft_platform.judging.execution.compose import build_judge
from rft_platform.judging.execution.judge_rollouts import judge_rollouts
from rft_platform.rollout.recording.model_handle import state_hash
from rft_platform.rounds.setup.algorithm import pipeline_of
from rft_platform.tasks.task import Task
from rft_platform.training.data.samples import demonstration_sample
from rft_platform.training.distributed import Ranks
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.packed.packed_policy import score
from rft_platform.training.protocol import TrainRequest

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "algorithms.md"
MARKS = ("<!-- learning table: begin -->", "<!-- learning table: end -->")
MAX_TOKENS = 6
TEACHER_STEPS = 200
ROUND_ROWS, STEP_ROWS = 512, 256  # rollouts a round, rows an optimiser step
NEAR = (-11, -10, -9, -2, -1, 1, 2, 9, 10, 11)  # how far a rejected answer is from the right one

#: What differs from ``DEFAULT``, by algorithm. ``algorithm`` is the section of the configuration.
DEFAULT: dict[str, Any] = {"rounds": 30, "lr": 5e-4, "algorithm": {}}
TUNED: dict[str, dict[str, Any]] = {
    "ppo": {"rounds": 20, "algorithm": {"repeat_times": 4, "critic": {"lr": 1e-3, "betas": [0.9, 0.99]}}},
    "reinforce++": {"algorithm": {"repeat_times": 4}},
    "on_policy_distill": {"algorithm": {"repeat_times": 4}},
    "gkd": {"rounds": 20, "lr": 1e-3, "algorithm": {"repeat_times": 4}},
    **{name: {"rounds": 20, "lr": 1e-4} for name in ("dpo", "ipo", "hinge", "kto", "simpo")},
    "cispo": {"lr": 2e-4},  # its ratio has no lower bound: at 5e-4 it falls before it rises
    # the defaults are for responses of thousands of tokens: here they would select nothing
    "clip_b": {"algorithm": {"policy_loss_fn_args": {"mu": 1.0}}},
    "clip_v": {"algorithm": {"policy_loss_fn_args": {"mu": 2.0, "max_share": 0.01}}},
    "mix": {"algorithm": {"experts": {"path": "experts.jsonl", "weight": 0.2}}},
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where things lie."""

    peers: Path
    work: Path

    @property
    def start(self) -> Path:
        """The model that every algorithm starts from."""
        return self.peers / "arithmetic" / "warm1m"

    @property
    def teacher(self) -> Path:
        """The better model."""
        return self.work / "teacher" / f"global_step_{TEACHER_STEPS}"

    def tasks(self, split: str) -> list[dict[str, str]]:
        """Problems with ``question`` and ``answer``."""
        lines = (self.peers / "arithmetic" / f"{split}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def result(self, algorithm: str, seed: int) -> Path:
        """File of one run's result."""
        return self.work / "runs" / f"{algorithm}-{seed}.json"


def rejected(task: Mapping[str, str], draw: np.random.Generator) -> str:
    """A wrong answer near the right one."""
    others = {str(max(0, int(task["answer"]) + by)) for by in NEAR} - {task["answer"]}
    return str(draw.choice(sorted(others)))


def write_data(place: Place) -> dict[str, str]:
    """The training tasks as demonstrations and as pairs."""
    tasks, draw = place.tasks("train"), np.random.default_rng(0)
    prompt, answer = [t["question"] for t in tasks], [t["answer"] for t in tasks]
    tables = {
        "demonstrations": {"prompt": prompt, "response": answer},
        "preferences": {
            "prompt": _messages("user", prompt),
            "chosen": _messages("assistant", answer),
            "rejected": _messages("assistant", [rejected(t, draw) for t in tasks]),
        },
    }
    files = {name: str(place.work / f"{name}.parquet") for name in tables}
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), files[name])
    return files


def _messages(role: str, texts: Sequence[str]) -> list[str]:
    """Each text as a list of one message, as JSON."""
    return [json.dumps([{"role": role, "content": text}]) for text in texts]


def make_teacher(place: Place) -> None:
    """More supervised steps on the right answers, the rate going to 0."""
    if (place.teacher / "config.json").exists():
        return
    request = TrainRequest(
        parent=str(place.start), parent_version=0, output=str(place.work / "teacher"),
        algorithm=AlgorithmSpec(policy_loss="sft"), demonstrations=str(place.work / "demonstrations.parquet"),
        train_batch_size=STEP_ROWS, max_steps=TEACHER_STEPS,
        optimizer=OptimizerSpec(
            lr=2e-3, betas=(0.9, 0.99), lr_scheduler_type="cosine", lr_warmup_steps=10, total_steps=TEACHER_STEPS
        ),
    )  # fmt: skip
    ranks = Ranks.join("cpu")
    TrainingSession(ranks, "float32").train(request, lambda event: None, lambda: False)
    ranks.leave()


class Run:
    """One algorithm from the warm start, by one seed."""

    def __init__(self, place: Place, algorithm: str, seed: int) -> None:
        self.settings = DEFAULT | TUNED.get(algorithm, {})
        self.place, self.seed = place, seed
        self.folder = place.work / f"{algorithm}-{seed}"
        shutil.rmtree(self.folder, ignore_errors=True)
        rate = {"lr": self.settings["lr"], "betas": [0.9, 0.99], "lr_warmup_steps": 5, "lr_scheduler_type": "linear"}
        section = {"algorithm_type": algorithm, "optimizer": rate, "teacher_model_path": str(place.teacher)}
        self.config = build_config(
            {
                "project": "learn", "name": algorithm,
                "model": {"model_path": str(place.start), "max_model_len": 64, "max_response_tokens": MAX_TOKENS},
                "algorithm": section | self.settings["algorithm"],
                "buffer": {"batch_size": 64, "explorer_input": {"taskset": {"path": "-", "judge": "exact_match"}}},
            }
        )  # fmt: skip
        self.preset = resolve(self.config).algorithm
        self.judge = build_judge("exact_match")
        self.store = ExperienceStore(self.folder / "rounds")
        self.sampler = Sampler(place.start, MAX_TOKENS)
        self.session = TrainingSession(Ranks.join("cpu"), "float32")
        self.draw = np.random.default_rng(seed)
        self.start_margin: np.ndarray | None = None
        self.train_tasks, self.held_out = place.tasks("train"), place.tasks("test")
        steps = self.settings["rounds"] * (ROUND_ROWS // STEP_ROWS)
        spec = resolve(self.config).spec
        if spec.critic is not None:
            critic = optimizer_spec(self.config.algorithm.critic, steps)
            spec = replace(spec, critic=CriticSpec(optimizer=critic))
        needs_reference = self.preset.reference == "always" or spec.beta > 0
        self.request = TrainRequest(
            parent=str(place.start), parent_version=0, output=str(self.folder / "checkpoints"),
            algorithm=spec, optimizer=optimizer_spec(self.config.algorithm.optimizer, steps),
            train_batch_size=STEP_ROWS, seed=seed,
            reference=str(place.start) if needs_reference else None,
            teacher=str(place.teacher) if self.preset.teacher else None,
        )  # fmt: skip

    def measure(self) -> dict[str, float]:
        """Held-out measures of the policy as it is now."""
        rollouts = self.sampler.rollouts(self.held_out, 2, seed=12345)
        found = {"pass": float(np.mean([rollout.reward for rollout in rollouts]))}
        if self.session.state is not None and self.preset.trains_on == "preferences":
            found |= self._pairs()
        if self.preset.teacher:
            found["kl_to_teacher"] = self._kl(rollouts)
        return found

    def _pairs(self) -> dict[str, float]:
        """Log-prob margins of the right answer over a wrong one."""
        draw, end = np.random.default_rng(1), self.sampler.tokenizer.end_ids[-1:]
        prompts = self.sampler.render(self.held_out)
        good = self.sampler.tokenizer.encode([task["answer"] for task in self.held_out])
        bad = self.sampler.tokenizer.encode([rejected(task, draw) for task in self.held_out])
        sums = []
        for answers in (good, bad):
            pairs = list(zip(prompts, answers, strict=True))
            values = self.session.score([[*prompt, *answer, *end] for prompt, answer in pairs])
            sums.append(np.array([sum(v[len(p) :]) for v, (p, _) in zip(values, pairs, strict=True)]))
        margin = sums[0] - sums[1]
        if self.start_margin is None:
            self.start_margin = margin
        moved = np.sign(np.round(margin - self.start_margin, 3))
        return {
            "pair_accuracy": float((margin > 0).mean()),
            "reward_accuracy": float((1 + moved).mean() / 2),
            "margin": float(margin.mean()),
        }

    def _kl(self, rollouts: Sequence[Rollout]) -> float:
        """Mean of log-prob less the teacher's over sampled tokens: KL(policy, teacher), estimated."""
        samples = []
        for index, rollout in enumerate(rollouts):
            ids = [*rollout.prompt_ids, *rollout.completion.token_ids]
            samples.append(demonstration_sample(str(index), ids, np.arange(len(ids)) >= len(rollout.prompt_ids)))
        teacher = self.session._precompute.teacher.model(self.place.teacher)
        theirs = np.concatenate(score(teacher, samples, max_tokens_per_pack=16384))
        own = np.concatenate([rollout.completion.logprobs for rollout in rollouts])
        return float((own - theirs).mean())

    def run(self) -> dict[str, Any]:
        """All rounds; measures before and after."""
        if self.preset.trains_on != "rollouts":  # hold the starting weights, to score with them
            self._train(replace(self._offline(), max_steps=1, optimizer=OptimizerSpec(lr=1e-12)), keep=False)
        before, cpu, started = self.measure(), time.process_time(), time.perf_counter()
        rewards: list[float] = []
        for number in range(1, self.settings["rounds"] + 1):
            request = self._offline() if self.preset.trains_on != "rollouts" else self._explored(number, rewards)
            self._train(request)
            state = self.session.state
            assert state is not None
            self.sampler.take(dict(state.policy.model.named_parameters()))
        spent = {"cpu_s": round(time.process_time() - cpu, 1), "wall_s": round(time.perf_counter() - started, 1)}
        after = self.measure()
        shutil.rmtree(self.folder)
        steps = self.request.parent_version
        return {"before": before, "after": after, "rewards": rewards, "optimizer_steps": steps, **spent}

    def _offline(self) -> TrainRequest:
        """The next steps over the data."""
        data = {self.preset.trains_on: str(self.place.work / f"{self.preset.trains_on}.parquet")}
        return replace(self.request, max_steps=ROUND_ROWS // STEP_ROWS, **data)

    def _explored(self, number: int, rewards: list[float]) -> TrainRequest:
        """A round of rollouts, judged and written."""
        runs = self.config.algorithm.repeat_times or self.preset.repeat_times
        chosen = [self.train_tasks[i] for i in self.draw.choice(len(self.train_tasks), ROUND_ROWS // runs, False)]
        best = self.sampler.rollouts(chosen, 1, seed=None, temperature=0.0) if self.preset.greedy_run else []
        sampled = self.sampler.rollouts(chosen, runs - bool(best), seed=int(self.draw.integers(1 << 31)))
        rollouts = [*best, *sampled]
        rewards.append(round(float(np.mean([rollout.reward for rollout in rollouts])), 3))
        rows = [self._row(number, index, rollout, index < len(best)) for index, rollout in enumerate(rollouts)]
        tasks = {str(i): Task(str(i), "sums", task["question"], task["answer"], task) for i, task in enumerate(chosen)}
        judged = judge_rollouts(
            rows, tasks, self.judge, advantage_fn=self.preset.advantage, advantage_args=self.preset.advantage_args,
            pipeline=pipeline_of(resolve(self.config)), needs_reward=self.preset.needs_reward,
        )  # fmt: skip
        experts = self.request.algorithm.expert_weight is not None
        return replace(
            self.request,
            seed=self.seed + (0 if experts else number),
            rollouts=(str(self.store.write_rollouts(number, 0, rows)),),
            judged=(str(self.store.write_judged(number, judged.rows[0].judge_version, judged.rows)),),
            demonstrations=str(self.place.work / "demonstrations.parquet") if experts else None,
        )

    def _row(self, number: int, index: int, rollout: Rollout, is_greedy: bool) -> RolloutRow:
        done, run = rollout.completion, f"{number}-{index}"
        return RolloutRow.from_columns(
            row_id=row_id(run, 0), task_id=str(rollout.group), taskset="sums", group_id=f"{number}-{rollout.group}",
            run_id=run, step=0, msg_id=run, round=number, policy_version=self.request.parent_version,
            engine="transformers", template_hash="", prompt_ids=rollout.prompt_ids, response_ids=done.token_ids,
            rollout_logprobs=done.logprobs, loss_mask=[True] * len(done.token_ids),
            temperature=0.0 if is_greedy else 1.0, top_p=1.0, top_k=-1,
            finish_reason=done.finish_reason, truncated=done.finish_reason == "length", messages=[], tools=[],
            response={"role": "assistant", "content": rollout.text if done.finish_reason == "stop" else ""},
            env_state_hash=state_hash(rollout.group),
        )  # fmt: skip

    def _train(self, request: TrainRequest, keep: bool = True) -> None:
        result = self.session.train(request, lambda event: None, lambda: False)
        if not keep:
            shutil.rmtree(result.checkpoint)
        elif result.steps:
            if self.request.parent_version:
                shutil.rmtree(self.request.parent)
            self.request = replace(self.request, parent=result.checkpoint, parent_version=result.policy_version)


def settings_digest(algorithm: str) -> str:
    """Results of other settings are not taken for these."""
    return digest_json([DEFAULT | TUNED.get(algorithm, {}), MAX_TOKENS, TEACHER_STEPS, ROUND_ROWS, STEP_ROWS])


def finished(place: Place, algorithm: str, seed: int) -> dict[str, Any] | None:
    """The result of a run that was done with the present settings."""
    file = place.result(algorithm, seed)
    found: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    return found if found is not None and found["settings"] == settings_digest(algorithm) else None


def run_all(place: Place, given: argparse.Namespace) -> None:
    """Processes for what is missing, ``--jobs`` at a time; one that fails is told and does not stop the others."""
    missing = [(a, s) for s in given.seeds for a in given.algorithms if finished(place, a, s) is None]
    running: list[tuple[str, subprocess.Popen[bytes]]] = []
    while missing or running:
        while missing and len(running) < given.jobs:
            algorithm, seed = missing.pop(0)
            command = [sys.executable, __file__, "--run", algorithm, str(seed), "--work", str(place.work)]
            log = (place.work / "runs" / f"{algorithm}-{seed}.log").open("wb")
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                [*command, "--peers", str(place.peers)], env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            running.append((f"{algorithm} seed {seed}", process))
        for name, process in running:
            if process.poll() is not None:
                print(f"{name}: {'done' if process.returncode == 0 else 'FAILED, see its log'}", flush=True)
        running = [(name, process) for name, process in running if process.poll() is None]
        time.sleep(0.5)


def collect(place: Place, algorithms: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Results by algorithm, and means of their measures."""
    results: dict[str, Any] = {}
    for algorithm in algorithms:
        runs = {seed: found for seed in seeds if (found := finished(place, algorithm, seed)) is not None}
        if not runs:
            continue
        measures = next(iter(runs.values()))["after"]
        change = {
            name: [round(mean(run[when][name] for run in runs.values()), 3) for when in ("before", "after")]
            for name in measures
        }
        results[algorithm] = {"mean": change, "runs": runs}
    return results


def table(results: Mapping[str, Any]) -> str:
    """The Markdown table."""
    lines = [
        "| algorithm_type | seeds | pass rate before | after, by seed | other measures, before → after | CPU-s a run |",
        "|---|---|---|---|---|---|",
    ]
    names = {
        "pair_accuracy": "pairs in order",
        "reward_accuracy": "reward accuracy",
        "margin": "margin (nats)",
        "kl_to_teacher": "KL to teacher (nats a token)",
    }
    for algorithm, found in results.items():
        runs = found["runs"].values()
        each = ", ".join(f"{run['after']['pass']:.3f}" for run in runs)
        others = [f"{names[k]} {a:.3f} → {b:.3f}" for k, (a, b) in found["mean"].items() if k != "pass"]
        seconds = mean(run["cpu_s"] for run in runs)
        cells = [
            f"`{algorithm}`",
            str(len(runs)),
            f"{found['mean']['pass'][0]:.3f}",
            each,
            "; ".join(others),
            f"{seconds:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_table(text: str) -> None:
    """Between the marks of the page."""
    page = PAGE.read_text()
    before, rest = page.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    PAGE.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}")


def main() -> None:
    """Run what is missing, then write JSON and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(os.environ.get("RFT_TEST_DATA", "")) / "peers")
    parser.add_argument("--work", type=Path, default=Path("algorithms-learn"))
    parser.add_argument("--algorithms", nargs="+", default=sorted(PRESETS), choices=sorted(PRESETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--no-page", action="store_true", help="leave docs/algorithms.md alone")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "algorithms_learn.json")
    parser.add_argument("--run", nargs=2, metavar=("ALGORITHM", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    place = Place(given.peers.resolve(), given.work.resolve())
    torch.set_num_threads(1)
    if given.run:
        algorithm, seed = given.run[0], int(given.run[1])
        found = {"settings": settings_digest(algorithm), **Run(place, algorithm, seed).run()}
        place.result(algorithm, seed).write_text(json.dumps(found) + "\n")
        return
    (place.work / "runs").mkdir(parents=True, exist_ok=True)
    write_data(place)
    make_teacher(place)
    run_all(place, given)
    results = collect(place, given.algorithms, given.seeds)
    settings = {"default": DEFAULT, "tuned": TUNED, "rollouts_a_round": ROUND_ROWS, "rows_a_step": STEP_ROWS}
    report = {"what": "held-out measures before and after", "machine": describe(), "settings": settings}
    given.out.write_text(json.dumps(report | {"results": results}, indent=1) + "\n")
    if not given.no_page:
        write_table(table(results))


if __name__ == "__main__":
    main()
