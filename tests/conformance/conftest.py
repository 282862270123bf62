"""One suite for every engine: a driver joins by one more entry of ``DRIVERS``."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rft_platform.inference.client import EngineClient
from rft_platform.inference.launcher import find_or_start_engine

DRIVERS = ["transformers"]
MAX_MODEL_LEN = 256
PROMPTS = [[1, 292, 201, 40 + i, *range(60, 60 + 3 * i), 2, 201] for i in range(6)]  # ids, of six lengths


@pytest.fixture(scope="session", params=DRIVERS)
def engine(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running engine with the tiny model, shared by the suite: a test that changes it puts it back."""
    home = tmp_path_factory.mktemp(f"engine-{request.param}")
    with find_or_start_engine(
        tiny_model, home / "leases", home / "logs", kind=request.param, max_model_len=MAX_MODEL_LEN, idle_timeout_s=600
    ) as client:
        yield client
        client.shutdown()


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> Callable[[list[int]], list[float]]:
    """Log-probs of a sequence by a plain transformers forward; the first token's is 0.0."""
    return load_reference(tiny_model)


def load_reference(folder: Path) -> Callable[[list[int]], list[float]]:
    """The plain forward of the model in ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def logprobs(ids: list[int]) -> list[float]:
        table = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return [0.0, *table.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1).tolist()]

    return logprobs


@pytest.fixture
def client(engine: EngineClient) -> Iterator[openai.OpenAI]:
    """OpenAI's own client on the engine."""
    with openai.OpenAI(base_url=engine.base_url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def model_name(engine: EngineClient) -> str:
    """The model's name on the OpenAI plane."""
    return engine.status().model_path


@pytest.fixture
def variant(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """``variant(change, name)``: a copy of the tiny model whose tensors ``change`` edits in place."""

    def make(change: Callable[[dict[str, Any]], None], name: str = "variant") -> Path:
        from safetensors.torch import load_file, save_file

        folder = tmp_path / name
        shutil.copytree(tiny_model, folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def close(left: list[float], right: list[float], tolerance: float = 1e-4) -> bool:
    """Whether two lists agree element by element."""
    return len(left) == len(right) and all(abs(a - b) <= tolerance for a, b in zip(left, right, strict=True))
