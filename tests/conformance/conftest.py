"""One suite for every engine: a driver joins by one more entry of ``DRIVERS``.

``RFT_TEST_ENGINES`` chooses among them (``transformers,vllm``), ``RFT_TEST_DTYPE`` sets the number format, and
``RFT_TEST_MODEL`` names the folder of a larger model with the tiny one's tokenizer (``benchmarks/shape_model.py``).
``RFT_TEST_EAGER=1`` spares vLLM on a GPU the minute that CUDA graphs take.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from rft_platform.config.home import Home
from rft_platform.inference.client import EngineClient
from rft_platform.inference.interface import Generation
from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine
from rft_platform.inference.launch.pool_start import find_or_start_pool
from rft_platform.inference.vllm_engine.server_settings import VllmOptions

POOLS = {"transformers-x2": ("transformers", 2)}  # name -> engine kind and number of replicas
ENGINES = os.environ.get("RFT_TEST_ENGINES", ",".join(["transformers", *POOLS, "vllm"])).split(",")
DRIVERS = [name for name in ENGINES if name not in POOLS]
DTYPE = os.environ.get("RFT_TEST_DTYPE", "float32")
EXACT = DTYPE == "float32"  # in 16 bits even the size of a batch changes the last digits
CANARY = 1e-5 if EXACT else 0.05  # mean |delta log-prob| in nats after a weight change
HALF_DELTA = 0.5  # the largest |delta log-prob| of a single token in 16 bits
MAX_MODEL_LEN = 256
TOOL_QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is 12*7?"}]
TOOL_ANSWER = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*7"}}\n</tool_call><|im_end|>'
FORCED = '<tool_call>\n{"name": "calculator", "arguments":'
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


def launch(request: pytest.FixtureRequest, kind: str, model: Path, home: Path, **settings: Any) -> EngineClient:
    """Find or start an engine of this kind; skips the test where this machine has none."""
    python = str(request.getfixturevalue("vllm_python")) if kind == "vllm" else None
    eager = bool(os.environ.get("RFT_TEST_EAGER"))
    options = VllmOptions(
        kv_cache_gb=0.5,
        max_lora_rank=16,
        gpu_memory_utilization=0.3,
        enforce_eager=eager,
        sleeps=device().type == "cuda",
    )
    where = {name: settings.pop(name) for name in ("replica",) if name in settings}
    spec = EngineSpec(**{"kind": kind, "dtype": DTYPE, "python": python, "vllm": options, **settings})
    return find_or_start_engine(model, Home(home).cluster, spec, **where)


class Running:
    """The engines that tests have asked for: each is started once, and runs until the last test."""

    def __init__(self, homes: pytest.TempPathFactory, model: Path) -> None:
        self._homes, self._model = homes, model
        self._found: dict[str, EngineClient] = {}
        self._stack = ExitStack()

    def get(self, request: pytest.FixtureRequest, name: str) -> EngineClient:
        """The engine of this name of ``ENGINES``; skips the test where this machine has none."""
        if name not in self._found:
            self._found[name] = self._start(request, name)
        return self._found[name]

    def _start(self, request: pytest.FixtureRequest, name: str) -> EngineClient:
        home = self._homes.mktemp(f"engine-{name}")
        kind, count = POOLS.get(name, (name, 1))

        def start(replica: int = 0) -> EngineClient:
            settings = {"max_model_len": MAX_MODEL_LEN, "idle_timeout_s": 3600, "replica": replica}
            return launch(request, kind, self._model, home, **settings)

        client = self._stack.enter_context(start() if count == 1 else find_or_start_pool(count, start))
        self._stack.callback(client.shutdown)
        return client

    def end(self) -> None:
        """Shut all of them down."""
        self._stack.close()


@pytest.fixture(scope="session")
def running_engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One engine of each kind for all files of this folder."""
    running = Running(tmp_path_factory, tiny_model)
    yield running
    running.end()


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest, running_engines: Running) -> EngineClient:
    """A running engine with the tiny model, shared by the suite: a test that changes it puts it back."""
    return running_engines.get(request, request.param)


@pytest.fixture(scope="session")
def tiny_model(tiny_model: Path) -> Path:
    """The model under test."""
    return Path(os.environ.get("RFT_TEST_MODEL") or tiny_model)


def device() -> Any:
    """Where the tests themselves compute."""
    import torch

    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Reference:
    """The same model in a plain transformers forward."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device())

    def logits(self, ids: list[int]) -> Any:
        """[tokens, vocabulary]"""
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([ids], device=self.model.device)).logits[0].cpu()

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
    with openai.OpenAI(base_url=engine.base_url, api_key=engine.api_key, max_retries=0) as client:
        yield client


def bearer(engine: EngineClient) -> dict[str, str]:
    """The header with the engine's API key."""
    return {"Authorization": f"Bearer {engine.api_key}"}


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

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompt = tokenizer.apply_chat_template(TOOL_QUESTION, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    examples = []
    for begun in ("", FORCED):  # an engine may put the beginning of a forced call into the prompt
        texts = prompt + begun, TOOL_ANSWER.removeprefix(begun)
        prompt_ids, answer_ids = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        ids = torch.tensor([prompt_ids + answer_ids], device=device())
        examples.append((ids, torch.tensor([[-100] * len(prompt_ids) + answer_ids], device=device())))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.4 / model.config.hidden_size)
    loss = float("inf")
    while loss > 0.01:
        losses = [model(ids, labels=labels).loss for ids, labels in examples]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = max(each.item() for each in losses)
    folder = tmp_path_factory.mktemp("model") / "memorised"
    shutil.copytree(tiny_model, folder)
    tensors = {name: tensor.cpu() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
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
    """Whether two lists agree element by element; ``tolerance`` is that of float32."""
    allowed = tolerance if EXACT else HALF_DELTA
    return len(left) == len(right) and all(abs(a - b) <= allowed for a, b in zip(left, right, strict=True))


def same(left: list[list[int]], right: list[list[int]]) -> bool:
    """Whether two lists of sampled answers are the same; in 16 bits, whether most of them begin in the same way."""
    if EXACT or len(left) != len(right):
        return left == right
    alike = [one[:4] == other[:4] for one, other in zip(left, right, strict=True)]
    return sum(alike) >= len(alike) / 2


def ids_of(generations: list[Generation]) -> list[list[int]]:
    """Ids of every answer, prompt by prompt."""
    return [done.token_ids for generation in generations for done in generation.completions]
