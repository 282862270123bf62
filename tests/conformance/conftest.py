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
TOOL_QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is 12*7?"}]
TOOL_ANSWER = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*7"}}\n</tool_call><|im_end|>'
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
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


class Reference:
    """The same model in a plain transformers forward."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logits(self, ids: list[int]) -> Any:
        """[tokens, vocabulary]"""
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0]

    def logprobs(self, ids: list[int]) -> list[float]:
        """Log-prob of each token given those before it; the first token's is 0.0."""
        import torch

        table = self.logits(ids)[:-1].log_softmax(-1)
        return [0.0, *table.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1).tolist()]


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> Reference:
    """The tiny model in a plain transformers forward."""
    return Reference(tiny_model)


@pytest.fixture
def client(engine: EngineClient) -> Iterator[openai.OpenAI]:
    """OpenAI's own client on the engine."""
    with openai.OpenAI(base_url=engine.base_url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def model_name(engine: EngineClient) -> str:
    """The model's name on the OpenAI plane."""
    return engine.status().model_path


@pytest.fixture(scope="session")
def memorised(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model trained until it answers ``TOOL_QUESTION`` with one call of the calculator."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompt = tokenizer.apply_chat_template(TOOL_QUESTION, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    prompt_ids, answer_ids = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, TOOL_ANSWER))
    ids = torch.tensor([prompt_ids + answer_ids])
    labels = torch.tensor([[-100] * len(prompt_ids) + answer_ids])
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = float("inf")
    while loss > 0.01:
        result = model(ids, labels=labels)
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = result.loss.item()
    folder = tmp_path_factory.mktemp("model") / "memorised"
    shutil.copytree(tiny_model, folder)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def restored(engine: EngineClient) -> Iterator[None]:
    """Puts the first weights back after a test that changes them."""
    yield
    engine.resume()
    status = engine.status()
    engine.update_weights(Path(status.model_path), 0)


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
