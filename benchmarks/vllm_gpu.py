"""The vLLM engine on a GPU: speed with and without detokenisation, log-probs, weight updates, LoRA adapters.

Serves a random-weight model of 0.6 billion parameters in bfloat16 through the platform's own launcher and control
plane. Log-probs are compared with a plain transformers forward in bfloat16 of the same weights.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from machine import describe
from safetensors.torch import load_file, save_file
from shape_model import build_shape_model
from transformers import AutoModelForCausalLM

from rft_platform.common.errors import WeightMismatchError
from rft_platform.config.home import Home
from rft_platform.inference.canary import Canary, check_canary, mean_difference, update_checked
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import SamplingParams
from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine
from rft_platform.inference.vllm_engine.server_settings import VllmOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT_TOKENS = 64
LOADS = ((1, 256), (64, 512), (512, 512))  # requests at once, new tokens each
COMPARED = 16  # sampled sequences whose log-probs are compared with the forward
ALLOWED_DELTA = 0.0105  # nats, mean
RANK, ALPHA = 16, 32


def main() -> None:
    """Measure everything and write it down as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--work", type=Path, default=Path("/tmp/rft_vllm_gpu"))
    parser.add_argument("--python", help="interpreter that has vLLM (default: this one)")
    parser.add_argument("--model", type=Path, help="folder of another model, to try the script")
    parser.add_argument("--small", action="store_true", help="few and short requests, to try the script")
    given = parser.parse_args()
    model = given.model or build_shape_model(given.work / "model")
    named = str(given.model or "0.6 billion parameters, random weights, bfloat16")
    result: dict[str, Any] = {"machine": describe(DEVICE), "model": named}
    loads = ((1, 8), (4, 8)) if given.small else LOADS

    def note(name: str, value: Any) -> None:
        result[name] = value
        given.out.write_text(json.dumps(result, indent=2) + "\n")
        print(name, json.dumps(value), flush=True)

    plain = VllmOptions(gpu_memory_utilization=0.6)
    with engine(given, model, "plain", plain, note) as client:
        note("status", {"engine": client.status().engine, "dtype": client.status().dtype})
        generate(client, *loads[min(1, len(loads) - 1)], seed=99)  # compiles what the first batches would
        note("tokens_per_second_ids", {n: speed(generate, client, n, length) for n, length in loads})
        note("tokens_per_second_openai_text", {n: speed(complete, client, n, length) for n, length in loads})
        note("logprobs", compare(client, model, loads[-1][1]))
        note("weight_update", update(client, model, given.work))
    with engine(
        given, model, "lora", VllmOptions(gpu_memory_utilization=0.6, max_lora_rank=RANK, enforce_eager=True), note
    ) as client:
        note("lora", adapters(client, model, given.work))


@contextmanager
def engine(given: Any, model: Path, name: str, options: VllmOptions, note: Callable[..., None]) -> Any:
    """A running engine, ended with the block."""
    begin = time.perf_counter()
    client = find_or_start_engine(
        model,
        Home(given.work / name).cluster,
        EngineSpec(kind="vllm", dtype="bfloat16", max_model_len=4096, python=given.python, vllm=options),
    )
    note(f"start_s_{name}", round(time.perf_counter() - begin, 1))
    try:
        yield client
    finally:
        client.shutdown()


def prompts_of(count: int, seed: int) -> list[list[int]]:
    """Random prompts, [count, PROMPT_TOKENS]."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, 390, (count, PROMPT_TOKENS), generator=draw).tolist()


def generate(client: EngineClient, count: int, length: int, seed: int = 1) -> int:
    """Sample over the token plane, with log-probs and without text; returns the number of tokens."""
    done = client.generate(prompts_of(count, seed), SamplingParams(length))
    return sum(len(answer.token_ids) for generation in done for answer in generation.completions)


def complete(client: EngineClient, count: int, length: int, seed: int = 1) -> int:
    """Sample over the OpenAI plane: text and log-probs, one request for all prompts; returns the number of tokens."""
    body = {"prompt": prompts_of(count, seed), "max_tokens": length, "logprobs": 0, "return_token_ids": True}
    key = {"Authorization": f"Bearer {client.api_key}"}
    answer = httpx.post(f"{client.base_url}/completions", json=body, headers=key, timeout=300, trust_env=False)
    answer.raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])


def speed(work: Callable[..., int], client: EngineClient, count: int, length: int) -> float:
    """Tokens a second, as the caller sees it."""
    begin = time.perf_counter()
    tokens = work(client, count, length)
    return round(tokens / (time.perf_counter() - begin), 1)


class Forward:
    """Plain transformers in bfloat16 on the GPU."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE).eval()

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> list[float]:
        """Log-prob of each token given those before it; the first token's is 0.0."""
        inputs = torch.tensor([ids], device=DEVICE)
        table = self.model(inputs).logits[0, :-1].float().log_softmax(-1)
        return [0.0, *table.gather(-1, inputs[0, 1:, None]).squeeze(-1).tolist()]


def compare(client: EngineClient, model: Path, length: int) -> dict[str, Any]:
    """Sampled and scored log-probs against the forward."""
    forward = Forward(model)
    sampled, scored = [], []
    for generation in client.generate(prompts_of(COMPARED, seed=2), SamplingParams(length)):
        (answer,) = generation.completions
        ids = generation.prompt_ids + answer.token_ids
        expected = forward.logprobs(ids)
        sampled += [abs(a - b) for a, b in zip(answer.logprobs, expected[PROMPT_TOKENS:], strict=True)]
        scored += [abs(a - b) for a, b in zip(client.score([ids])[0][1:], expected[1:], strict=True)]
    means = {"sampled_mean": sum(sampled) / len(sampled), "scored_mean": sum(scored) / len(scored)}
    return {**means, "sampled_max": max(sampled), "tokens": len(sampled), "ok": max(means.values()) <= ALLOWED_DELTA}


def canary_of(folder: Path) -> Canary:
    """What a trainer would leave beside the weights of ``folder``."""
    forward, prompts = Forward(folder), prompts_of(8, seed=3)
    return Canary(prompts, [forward.logprobs(prompt) for prompt in prompts])


def moved(model: Path, folder: Path, change: Callable[[str, torch.Tensor], None]) -> Path:
    """A copy of the model whose tensors ``change`` edits in place."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        change(name, tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result)"""
    begin = time.perf_counter()
    result = work()
    return round(time.perf_counter() - begin, 3), result


def update(client: EngineClient, model: Path, work: Path) -> dict[str, Any]:
    """Other weights from a folder, checked; a folder with one wrong tensor, refused; the first weights again."""

    def all_tensors(name: str, tensor: torch.Tensor) -> None:
        tensor += 0.1 * tensor.float().std().to(tensor.dtype) * torch.randn_like(tensor)

    def one_tensor(name: str, tensor: torch.Tensor) -> None:
        if name == "model.layers.2.mlp.down_proj.weight":
            tensor *= -20

    first, other = canary_of(model), moved(model, work / "other", all_tensors)
    theirs = canary_of(other)
    seconds, _ = timed(lambda: client.update_weights(other, 1))
    after = check_canary(client, theirs)
    old_against_new = mean_difference(client.score(first.sequences), first.logprobs)
    back_s, back = timed(lambda: update_checked(client, model, 2, first))
    refused = ""
    try:
        update_checked(client, moved(model, work / "spoilt", one_tensor), 3, first)
    except WeightMismatchError as error:
        refused = str(error)
    return {
        "update_s": seconds,
        "mean_delta_after": after,
        "old_canary_against_new_weights": old_against_new,
        "checked_update_s": back_s,
        "mean_delta_back": back,
        "spoilt_refused": refused,
        "served_after_refusal": client.status().policy_version,
        "mean_delta_after_refusal": check_canary(client, first),
    }


def adapter(model: Path, folder: Path, seed: int) -> tuple[Path, Path]:
    """A LoRA adapter on every linear layer, and the folder of the model with it merged."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    tensors, merged = {}, load_file(model / "model.safetensors")
    for name, weight in merged.items():
        if not name.endswith("_proj.weight"):
            continue
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        down = (torch.randn(RANK, weight.shape[1], generator=draw) / weight.shape[1] ** 0.5).to(weight.dtype)
        up = (0.05 * torch.randn(weight.shape[0], RANK, generator=draw)).to(weight.dtype)
        tensors |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
        weight += (ALPHA / RANK * up.float() @ down.float()).to(weight.dtype)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "lora_dropout": 0.0}))
    whole = moved(model, folder.with_name(f"{folder.name}-merged"), lambda name, tensor: tensor.copy_(merged[name]))
    return folder, whole


def adapters(client: EngineClient, model: Path, work: Path) -> dict[str, Any]:
    """One adapter, another in its place, and the full weights again; each checked against the merged model."""
    first = canary_of(model)
    result: dict[str, Any] = {}
    for version in (1, 2):
        folder, merged = adapter(model, work / f"adapter{version}", seed=version)
        canary = canary_of(merged)
        seconds, _ = timed(lambda folder=folder, version=version: client.update_weights(folder, version))
        result[f"load_{version}"] = {"load_s": seconds, "mean_delta": check_canary(client, canary)}
        result[f"load_{version}"]["base_against_it"] = mean_difference(client.score(first.sequences), first.logprobs)
    seconds, mean = timed(lambda: update_checked(client, model, 3, first))
    result["full_weights_again"] = {"checked_update_s": seconds, "mean_delta": mean}
    return result


if __name__ == "__main__":
    main()
