"""SIGKILL of trainer, engine and driver on a GPU: does the run continue, to the same result, and is the memory freed?

``python benchmarks/kills_gpu.py --out FILE`` runs one round of the demo's project on a GPU, copies its home twice, and
continues the three homes side by side: two undisturbed, the other with a kill of the trainer in round 2, of the engine
in round 3 and of the driver in round 4 (a driver is started again, as a service manager would do). It reports rows,
optimiser steps and held-out pass rates of all, the mean |difference of log-probs| of their last weights on correct
answers, and the GPU's memory in use before and after. The difference between the two undisturbed runs is the noise of
bf16 rollouts, to which the disturbed run is compared. ``--engine transformers`` checks the script on a CPU.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent))
from learning_gpu import write_project
from machine import describe

from chaos.process_table import processes_with_role
from rft_platform.common.files import read_json, write_json
from rft_platform.config.home import Home
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import required

ROUNDS = 4
KILLS = {2: "trainer", 3: "engine", 4: "driver"}  # role that is killed once the round has explored
QUESTIONS = [(3, 4), (17, 25), (48, 9), (60, 37), (5, 94), (71, 18), (33, 33), (12, 80)]


def drive(work: Path, config: Path, home: Path, log: Path, *options: str) -> "subprocess.Popen[bytes]":
    """Start ``rft run`` of the project."""
    command = [sys.executable, "-m", "rft_platform", "run", "--config", str(config), *options]
    with log.open("ab") as output:
        return subprocess.Popen(
            command, cwd=work, env={**os.environ, "RFT_HOME": str(home)}, stdout=output, stderr=subprocess.STDOUT
        )


def run(work: Path, config: Path, home: Path, kills: dict[int, str], *options: str) -> dict[str, Any]:
    """Run the project to its end; kill what ``kills`` names, and start the driver again when it was the one."""
    log, started, left, killed = work / f"{home.name}.log", time.perf_counter(), dict(kills), []
    driver = drive(work, config, home, log, *options)
    while driver.poll() is None:
        number = next(iter(left), None)
        if number is not None and (home / "rounds" / f"r{number:04d}" / "explore.json").exists():
            processes = processes_with_role(Home(home), role := left[number])
            if processes:  # a trainer starts with the first training of a command
                del left[number]
            for process in processes:
                os.kill(process.pid, signal.SIGKILL)
                killed.append({"round": number, "role": role, "pid": process.pid})
            if processes and role == "driver":
                driver.wait()
                driver = drive(work, config, home, log)
        time.sleep(0.05)
    if driver.returncode != 0 or left:
        raise SystemExit(
            f"rft run ended with exit code {driver.returncode}, without kills {left}:\n{log.read_text()[-4000:]}"
        )
    return {"seconds": round(time.perf_counter() - started, 1), "killed": killed}


def finish(work: Path, config: Path, home: Path, kills: dict[int, str]) -> dict[str, Any]:
    """Run the project to its end, stop its engine and trainer, and return what the run left."""
    try:
        found = run(work, config, home, kills)
        found |= outcome(home)
    finally:
        stop(home)
    print(home.name, found, flush=True)
    return found


def stop(home: Path) -> None:
    """End engine and trainer of the home."""
    command = [sys.executable, "-m", "rft_platform", "stop"]
    subprocess.run(command, env={**os.environ, "RFT_HOME": str(home)}, check=True)


def outcome(home: Path) -> dict[str, Any]:
    """What a run left: rows, steps, tries and pass rates."""
    environment = {**os.environ, "RFT_HOME": str(home)}
    command = [sys.executable, "-m", "rft_platform", "rounds", "--json"]
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    rounds = [entry for entry in json.loads(shown.stdout)["rounds"] if entry["round"] > 0]
    folder = home / "rounds"
    rows = {}
    for entry in rounds:
        note = read_json(folder / f"r{entry['round']:04d}" / "explore.json")
        rows[entry["round"]] = note["rows"]
    return {
        "rounds": len(rounds),
        "rows": rows,
        "pass_rates": {entry["round"]: entry["pass_rate_sampled"] for entry in rounds if entry["pass_rate_sampled"]},
        "policy_version": required(Project.open(Home(home)).store, len(rounds)).policy_version,
    }


def log_prob_difference(homes: list[Path]) -> float:
    """Mean |difference| of the log-probs that the last weights of two homes give to correct answers, in nats."""
    found = []
    for home in homes:
        folder = required(Project.open(Home(home)).store, ROUNDS).folder
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        values = []
        for first, second in QUESTIONS:
            question = [{"role": "user", "content": f"{first}+{second}"}]
            prompt = tokenizer.apply_chat_template(
                question, tokenize=True, add_generation_prompt=True, return_dict=False
            )
            answer = tokenizer(str(first + second), add_special_tokens=False).input_ids
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            values.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None]).flatten())
        found.append(torch.cat(values))
    return float((found[0] - found[1]).abs().mean())


def memory_in_use() -> int | None:
    """MB in use on the first visible GPU, by every process; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", f"--id={index}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Run all, compare, and write the file."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--size", default="10m")
    options.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    given = options.parse_args()
    before = memory_in_use()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        config = write_project(work, 1, ROUNDS, given.size, given.engine, compiled=False)
        undisturbed, repeated, disturbed = (work / name for name in ("undisturbed", "repeated", "disturbed"))
        homes: dict[Path, dict[int, str]] = {undisturbed: {}, repeated: {}, disturbed: KILLS}
        result: dict[str, Any] = {
            "machine": describe("cuda" if given.engine == "vllm" else "cpu"),
            "settings": {"size": given.size, "rounds": ROUNDS, "kills": KILLS, "engine": given.engine},
        }
        try:
            run(work, config, undisturbed, {}, "--rounds", "1")
        finally:
            stop(undisturbed)
        for copied in (repeated, disturbed):
            shutil.copytree(undisturbed, copied)
        with ThreadPoolExecutor() as pool:  # side by side: GPU time is scarce, and times are not compared
            runs = {home: pool.submit(finish, work, config, home, kills) for home, kills in homes.items()}
            result |= {home.name: found.result() for home, found in runs.items()}
        result["log_prob_difference"] = {
            home.name: log_prob_difference([undisturbed, home]) for home in (repeated, disturbed)
        }
    result["gpu_mb"] = {"before": before, "after": memory_in_use()}
    print(result["log_prob_difference"], result["gpu_mb"], flush=True)
    write_json(given.out, result)


if __name__ == "__main__":
    main()
