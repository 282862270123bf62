"""TRL's side of ``training_vs_trl.py``: one of its trainers, told over stdin to run some steps at a time.

Runs in a Python that has TRL; knows nothing of the platform. Each line read is a number of optimiser steps, each line
written is what they took: wall seconds, of which seconds in generation and scoring, and the peak memory so far.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=("grpo", "sft", "dpo"))
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True, help="JSON lines with question, answer and rejected")
parser.add_argument("--work", required=True)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--bf16", type=int, default=0)
parser.add_argument("--batch", type=int, required=True, help="completions, samples or pairs an optimiser step")
parser.add_argument("--runs", type=int, default=8)
parser.add_argument("--max-tokens", type=int, default=6)
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--graded", type=int, default=0, help="reward by distance instead of equality")
given = parser.parse_args()

answers = os.fdopen(os.dup(1), "w")  # stdout is the trainers' own
os.dup2(2, 1)

import datasets  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402

torch.set_num_threads(given.threads)
datasets.disable_progress_bars()
transformers.utils.logging.set_verbosity_error()
STEPS = 100_000
spent = {"generation": 0.0, "generation_and_scoring": 0.0}


class OnCommand(transformers.TrainerCallback):
    """Stops at the end of a step until more are asked for."""

    left = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Ready."""
        self._tell({"ready": True})
        self._ask(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Report after the last step that was asked for."""
        self.left -= 1
        if self.left > 0 or control.should_training_stop:
            return
        seconds = time.perf_counter() - self.started
        status = Path("/proc/self/status").read_text()  # getrusage would begin at the peak of the starting process
        memory = int(status.split("VmHWM:")[1].split()[0]) / 1024
        self._tell({"steps": self.asked, "seconds": seconds, "peak_rss_mb": memory, **spent})
        self._ask(control)

    def _ask(self, control: Any) -> None:
        line = sys.stdin.readline()
        if not line.strip():
            control.should_training_stop = True
            return
        self.left = self.asked = int(line)
        spent.update(dict.fromkeys(spent, 0.0))
        self.started = time.perf_counter()

    def _tell(self, answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class TimedGRPO(trl.GRPOTrainer):
    """Measures what is not training."""

    def _timed(self, name: str, work: Any, *args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        result = work(*args, **options)
        spent[name] += time.perf_counter() - started
        return result

    def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
        return self._timed("generation", super()._generate_single_turn, *args, **options)

    def _generate_and_score_completions(self, *args: Any, **options: Any) -> Any:
        return self._timed("generation_and_scoring", super()._generate_and_score_completions, *args, **options)


def exact(completions: list[Any], answer: list[str], **others: Any) -> list[float]:
    """1 for the exact answer."""
    return [float(c[0]["content"].strip() == a) for c, a in zip(completions, answer, strict=True)]


def graded(completions: list[Any], answer: list[str], **others: Any) -> list[float]:
    """1 for the answer, less the further away: runs of a group seldom have equal rewards."""
    texts = [c[0]["content"].strip() for c in completions]
    return [-abs(int(t) - int(a)) / 1000 if t.isdecimal() else -1 for t, a in zip(texts, answer, strict=True)]


def user(question: str) -> list[dict[str, str]]:
    """The conversation that asks it."""
    return [{"role": "user", "content": question}]


def assistant(text: str) -> list[dict[str, str]]:
    """The answer to it."""
    return [{"role": "assistant", "content": text}]


rows = [json.loads(line) for line in Path(given.data).read_text().splitlines()]
tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
common = {
    "output_dir": given.work, "max_steps": STEPS, "learning_rate": given.lr, "lr_scheduler_type": "constant",
    "per_device_train_batch_size": given.batch, "logging_steps": 10, "save_strategy": "no", "report_to": "none",
    "use_cpu": True, "bf16": bool(given.bf16), "gradient_checkpointing": False, "disable_tqdm": True, "seed": 1,
    "optim": "adamw_torch_fused", "adam_beta2": 0.99, "weight_decay": 0.0, "max_grad_norm": 1.0,
}  # fmt: skip
kit = {"model": model, "processing_class": tokenizer, "callbacks": [OnCommand()]}
if given.what == "grpo":
    data = [{"prompt": user(r["question"]), "answer": r["answer"]} for r in rows]
    config = trl.GRPOConfig(
        generation_batch_size=given.batch, num_generations=given.runs, num_iterations=1, beta=0.0, temperature=1.0,
        max_completion_length=given.max_tokens, loss_type="dapo", scale_rewards="group", **common,
    )  # fmt: skip
    reward = graded if given.graded else exact
    trainer = TimedGRPO(reward_funcs=reward, args=config, train_dataset=datasets.Dataset.from_list(data), **kit)
elif given.what == "sft":
    data = [{"prompt": user(r["question"]), "completion": assistant(r["answer"])} for r in rows]
    config = trl.SFTConfig(max_length=64, completion_only_loss=True, **common)
    trainer = trl.SFTTrainer(args=config, train_dataset=datasets.Dataset.from_list(data), **kit)
else:
    data = [
        {"prompt": user(r["question"]), "chosen": assistant(r["answer"]), "rejected": assistant(r["rejected"])}
        for r in rows
    ]
    config = trl.DPOConfig(beta=0.1, max_length=64, **common)
    trainer = trl.DPOTrainer(args=config, train_dataset=datasets.Dataset.from_list(data), **kit)
trainer.remove_callback(transformers.PrinterCallback)
trainer.train()
