"""Does the example examples/agentscope_tune learn? A real AgentScope ReAct agent on a tiny model, several seeds.

    .venv/bin/python benchmarks/tune_agentscope.py --seeds 1 2 3 --json benchmarks/results/tune_agentscope.json

Run it with the interpreter of the environment that examples/agentscope_tune/setup.sh makes. Workflow and judge are the
example's own. Its judge asks only whether the right number stands in the reply, which a model can learn to game by
saying more; so exact matches are counted beside the reward. The tiny model does not know the agent's system prompt:
each run begins with a warm start on answers below that prompt, up to a mark, and what it reaches there is "before".
"""

import argparse
import importlib.util
import json
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from rft_platform.common.files import write_json
from rft_platform.run.machine import machine_facts
from rft_platform.tuner import AlgorithmConfig, DatasetConfig, JudgeOutput, TuneResult, TunerModelConfig, tune

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "agentscope_tune" / "main.py"
SYSTEM_PROMPT = "你是一个乐于助人的数学题解答智能体。"
CONTEXT = 160  # the prompt takes about 75 tokens of the byte-level vocabulary
ANSWER = 8  # tokens: room for more than the three digits of a sum, so that the judge can be gamed


def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("agentscope_tune_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_example_module = _example()


async def run_react_agent(task: dict[str, Any], model: Any, auxiliary_models: dict[str, Any]) -> Any:
    """The example's workflow, unchanged."""
    return await _example_module.run_react_agent(task, model, auxiliary_models)


async def judge_function(task: dict[str, Any], response: Any, auxiliary_models: dict[str, Any]) -> JudgeOutput:
    """The example's judge, unchanged; exact matches are counted beside its reward."""
    judged = await _example_module.judge_function(task, response, auxiliary_models)
    exact = (response.get_text_content() or "").strip() == task["answer"]
    return JudgeOutput(reward=judged.reward, metrics={"exact": float(exact)})


def _configuration(seed: int, tasks: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What ``tune()`` has no argument for."""
    answers = {"prompt_key": "question", "response_key": "answer", "system_prompt": SYSTEM_PROMPT}
    return {
        "seed": seed,
        "algorithm": {"optimizer": {"betas": [0.9, 0.99], "lr_warmup_steps": 5, "lr_scheduler_type": "linear"}},
        "warm_start": {
            "path": str(tasks),
            "split": "train",
            "format": answers,
            "batch_size": 64,
            "steps": 1500,
            "eval_every": args.warm_every,
            "stop_at": args.warm_until,
            "cooldown_steps": 20,
            "optimizer": {"lr": args.warm_lr, "betas": [0.9, 0.99], "lr_warmup_steps": 20},
        },
        "explorer": {"runner_per_model": 64},
        # two optimiser steps a round: a rollout costs far more than what is learned from it
        "buffer": {"train_batch_size": args.batch_size * 4, "explorer_input": {"taskset": {"name": "additions"}}},
    }


def _tuned(seed: int, args: argparse.Namespace, folder: Path) -> TuneResult:
    config = folder / f"seed-{seed}.yaml"
    config.write_text(json.dumps(_configuration(seed, args.tasks, args)), encoding="utf-8")  # JSON is YAML
    return tune(
        workflow_func=run_react_agent,
        judge_func=judge_function,
        train_dataset=DatasetConfig(path=str(args.tasks), split="train", total_steps=args.steps),
        eval_dataset=DatasetConfig(path=str(args.tasks), split=f"test[:{args.held_out}]"),
        model=TunerModelConfig(model_path=str(args.model), max_model_len=CONTEXT, max_tokens=ANSWER),
        algorithm=AlgorithmConfig(
            algorithm_type="multi_step_grpo",
            group_size=8,
            batch_size=args.batch_size,
            learning_rate=args.lr,
            eval_interval_steps=args.eval_every,
            save_interval_steps=args.steps,
        ),
        experiment_name=f"seed-{seed}",
        config_path=str(config),
    )


def _scores(measured: dict[str, float]) -> dict[str, float]:
    """Mean reward and share of exact matches on the held-out tasks, sampled and greedy."""
    named = {"reward": "/reward/mean@1", "greedy_reward": "/greedy_reward/mean@1"}
    found = {key: [v for name, v in measured.items() if name.endswith(end)] for key, end in named.items()}
    exact = {name: value for name, value in measured.items() if name.endswith("/exact/mean@1")}
    found["exact"] = [value for name, value in exact.items() if "greedy_" not in name]
    found["greedy_exact"] = [value for name, value in exact.items() if "greedy_" in name]
    return {key: values[0] for key, values in found.items() if values}


def _outcome(seed: int, result: TuneResult, seconds: float) -> dict[str, Any]:
    curve = [{"step": record.step, **_scores(record.eval)} for record in result.history if record.eval]
    return {
        "seed": seed,
        "before": curve[0],
        "after": curve[-1],
        "curve": curve,
        "train_reward": [record.reward for record in result.history if record.reward is not None],
        "wall_s": round(seconds, 1),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=120, help="rounds; each has two optimiser steps")
    parser.add_argument("--batch-size", type=int, default=64, help="tasks a step")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--held-out", type=int, default=300, help="tasks")
    parser.add_argument("--eval-every", type=int, default=30, help="rounds")
    parser.add_argument("--warm-until", type=float, default=0.25, help="sampled pass rate")
    parser.add_argument("--warm-every", type=int, default=20, help="steps between looks at it")
    parser.add_argument("--warm-lr", type=float, default=2e-3)
    parser.add_argument("--model", type=Path, help="model folder; default: the recipe's untrained one")
    parser.add_argument("--tasks", type=Path, help="folder of train.jsonl and test.jsonl; default: the recipe's")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args()


def main() -> None:
    """Run every seed and print a line each."""
    import os

    args = _arguments()
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="tune-agentscope-"))).absolute()
    target = args.json.absolute() if args.json else None
    folder.mkdir(parents=True, exist_ok=True)
    if args.model is None or args.tasks is None:
        from rft_platform.recipes.recipe import recipe_named

        recipe = folder / "recipe"
        if not recipe.exists():
            recipe_named("arithmetic").write(recipe)
        args.model, args.tasks = args.model or recipe / "model", args.tasks or recipe / "tasks"
    args.model, args.tasks = args.model.absolute(), args.tasks.absolute()
    os.chdir(folder)
    outcomes = []
    for seed in args.seeds:
        started = time.perf_counter()
        outcomes.append(_outcome(seed, _tuned(seed, args, folder), time.perf_counter() - started))
        print(json.dumps({key: outcomes[-1][key] for key in ("seed", "before", "after", "wall_s")}), flush=True)
    if target is not None:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        write_json(target, {"settings": settings, "machine": machine_facts(), "runs": outcomes})


if __name__ == "__main__":
    main()
