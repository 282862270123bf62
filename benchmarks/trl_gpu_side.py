"""TRL's side of ``round_gpu.py``: GRPO steps with vLLM in the trainer's process and Liger kernels.

Runs in a Python that has TRL, vLLM and Liger; knows nothing of the platform. The last line of its output is JSON:
seconds of each step, of its generation and scoring, completion tokens a step, versions, and the peak of the GPU's
memory. After SIGTERM it has the steps that were complete.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import zlib
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_LOGGING_LEVEL="WARNING")
for name, value in {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
}.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402


class Clock(TrainerCallback):
    """Seconds of each step, from the end of the step before."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self._before: float | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start with the first step."""
        self._before = self._before or time.time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Wait for the GPU, then note the time."""
        torch.cuda.synchronize()
        assert self._before is not None
        now = time.time()
        self.step_s.append(round(now - self._before, 2))
        self._before = now
        print(f"peer: step {len(self.step_s)} took {self.step_s[-1]} s", file=sys.stderr, flush=True)


def main() -> None:
    """Train, and print the figures."""
    given = read_options()
    rng, (least, most) = random.Random(7), map(int, given.repeats.split("-"))
    prompts = [f"what is the sum of {n} and {n * 7 % 13}? " * rng.randint(least, most) for n in range(4096)]
    clock, tokens, generation_s = Clock(), [], []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [float(zlib.crc32(text[:64].encode()) % 7) for text in completions]

    arguments = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=given.rows,
        gradient_accumulation_steps=given.prompts * given.group // given.rows,
        num_generations=given.group,
        max_completion_length=given.new_tokens,
        learning_rate=1e-6,
        bf16=True,
        mask_truncated_completions=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=given.engine_share,
        vllm_max_model_length=given.context,
        beta=0.0,
        temperature=1.0,
        max_steps=given.steps,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=bool(given.checkpointing),
        use_liger_kernel=True,
    )
    adapter = {}
    if given.lora:
        from peft import LoraConfig

        adapter = {"peft_config": LoraConfig(r=given.lora, lora_alpha=given.lora, target_modules="all-linear")}
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=AutoTokenizer.from_pretrained(given.model),
        callbacks=[clock],
        **adapter,
    )
    generate = trainer._generate_and_score_completions  # its time is reported by no public figure

    def timed(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        started = time.time()
        found = generate(*args, **kwargs)
        torch.cuda.synchronize()
        generation_s.append(round(time.time() - started, 2))
        return found

    trainer._generate_and_score_completions = timed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        trainer.train()
    except KeyboardInterrupt:
        print(f"peer: ended after {len(clock.step_s)} of {given.steps} steps", file=sys.stderr)
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    peak = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    figures = {"step_s": clock.step_s, "generation_and_scoring_s": generation_s, "completion_tokens": tokens}
    print(json.dumps({**versions, "rows": given.rows, "lora_rank": given.lora or None, **figures, "peak_gib": peak}))


def read_options() -> argparse.Namespace:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", required=True)
    options.add_argument("--rows", type=int, required=True, help="rows of a forward pass")
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--prompts", type=int, default=64, help="prompts an optimiser step")
    options.add_argument("--group", type=int, default=8, help="completions of a prompt")
    options.add_argument("--new-tokens", type=int, default=512)
    options.add_argument("--context", type=int, default=1024)
    options.add_argument("--repeats", default="4-4", help="least and most repetitions of the question in a prompt")
    options.add_argument("--lora", type=int, default=0, metavar="RANK")
    options.add_argument("--checkpointing", type=int, default=0)
    options.add_argument("--engine-share", type=float, default=0.35)
    return options.parse_args()


if __name__ == "__main__":
    main()
