"""The frameworks' environments, and an engine whose tiny model calls the calculator for each of them."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rft_platform.cluster.local.locks import locked
from rft_platform.common.files import digest_file, digest_json
from rft_platform.config.home import Home
from rft_platform.config.rollout_limits import RolloutLimits
from rft_platform.experience.record import RolloutRow
from rft_platform.inference.interface import PolicyEngine, SamplingParams
from rft_platform.rollout.runner.run_rollouts import run_rollouts
from rft_platform.rollout.workflow import WorkerWorkflow
from rft_platform.tasks.task import Task

from .teacher import ANSWER, QUESTION, Teacher, demonstrations
from .teacher import __file__ as TEACHER

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: Framework -> example and environment. The bare loop is run with both lines of openai's client.
STACKS = {
    "agentscope": ("agentscope_react", ".venv"),
    "agentscope_structured": ("agentscope_react", ".venv"),
    "agentscope2": ("agentscope2", ".venv"),
    "langgraph": ("langgraph", ".venv"),
    "openai_agents": ("openai_agents", ".venv"),
    "smolagents": ("smolagents", ".venv"),
    "pydantic_ai": ("pydantic_ai", ".venv"),
    "openai3": ("openai_loop", ".venv"),
    "openai2": ("openai_loop", ".venv-openai2"),
}
#: How often the teacher is watched: what smolagents writes into its prompts differs from run to run.
LESSONS = {"smolagents": 4}
STEPS, LEG, LEARNED = 200, 10, 0.03


def python_of(stack: str) -> Path | None:
    """The interpreter of a framework's environment below ``RFT_AGENT_ENVS`` or else ``examples``; None: not made."""
    example, environment = STACKS[stack]
    python = Path(os.environ.get("RFT_AGENT_ENVS") or EXAMPLES) / example / environment / "bin" / "python"
    return python if python.exists() else None


def required(stack: str) -> Path:
    """The interpreter, or skip."""
    python = python_of(stack)
    if python is None:
        example, environment = STACKS[stack]
        pytest.skip(f"{stack}: no {example}/{environment} (make test-agents, or examples/{example}/setup.sh)")
    return python


def run_agent(engine: PolicyEngine, stack: str, log_folder: Path, repeat_times: int = 1) -> list[RolloutRow]:
    """The rows of an example's agent asking ``engine`` for the answer to one question, greedily."""
    file = EXAMPLES / STACKS[stack][0] / "workflow.py"
    if stack == "agentscope_structured":
        file = Path(__file__).with_name("structured_agent.py")
    workflow = WorkerWorkflow(f"{file}:workflow", python=str(required(stack)), count=1, log_folder=log_folder)
    return run_workflow(engine, workflow, repeat_times)


def run_workflow(engine: PolicyEngine, workflow: WorkerWorkflow, repeat_times: int = 1) -> list[RolloutRow]:
    """The rows of a workflow that is given the one question."""
    task = Task("task", "questions", QUESTION, ANSWER, {"question": QUESTION, "answer": ANSWER})
    batch = run_rollouts(
        engine, [task], workflow, round=1, batch=0, repeat_times=repeat_times,
        sampling=SamplingParams(max_tokens=64, temperature=0.0),
        limits=RolloutLimits(timeout_s=120, max_retries=0, group_policy="partial"),
    )  # fmt: skip
    assert batch.report.failed == 0, batch.report.errors
    return batch.rows


@pytest.fixture(scope="session")
def pupil(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The tiny model after supervised fine-tuning on what a teacher answers each framework that is here.

    It is kept between sessions, because it takes a minute, and made anew when anything changes that prompts depend on.
    """
    stacks = [stack for stack in STACKS if python_of(stack) is not None]
    if not stacks:
        pytest.skip("no framework's environment is here (make test-agents, or examples/*/setup.sh)")
    cache: Any = request.config.cache
    built = json.loads((tiny_model / "build.json").read_text())
    known = {stack: _what_prompts_depend_on(stack) for stack in stacks}
    folder = Path(cache.mkdir("rft-agents")) / digest_json([built, known, digest_file(Path(__file__))])[:16]
    with locked(folder, 280):  # another worker of this session may be making it
        if not folder.exists():
            rows = watch(stacks, tmp_path_factory.mktemp("lessons"))
            teach(request.getfixturevalue("ranks"), tiny_model, demonstrations(rows), folder)
    return folder


def _what_prompts_depend_on(stack: str) -> list[str]:
    """The packages of a framework's environment, and digests of the agent and of its teacher."""
    packages = sorted(folder.name for folder in required(stack).parents[1].glob("lib/*/site-packages/*.dist-info"))
    code = [EXAMPLES / STACKS[stack][0] / "agent.py", *Path(__file__).parent.glob("*_agent.py"), Path(TEACHER)]
    return [*packages, *(digest_file(file) for file in code)]


def watch(stacks: list[str], log_folder: Path) -> list[RolloutRow]:
    """What the frameworks ask, and how the teacher answers."""
    teacher = Teacher()
    teacher.serve()
    try:
        return [row for stack in stacks for row in run_agent(teacher, stack, log_folder, LESSONS.get(stack, 1))]
    finally:
        teacher.shutdown()


def teach(ranks: Any, model: Path, shown: list[dict[str, Any]], target: Path) -> None:
    """Train until the demonstrations are known by heart."""
    from rft_platform.algorithms.spec import AlgorithmSpec, OptimizerSpec
    from rft_platform.training.loop.session import TrainingSession
    from rft_platform.training.protocol import TrainRequest

    work = target.with_suffix(".work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    columns = {name: [json.dumps(conversation[name]) for conversation in shown] for name in ("messages", "tools")}
    pq.write_table(pa.table(columns), work / "demonstrations.parquet")
    session, parent, step, loss = TrainingSession(ranks, "float32"), str(model), 0, float("inf")
    while loss > LEARNED and step < STEPS:
        result = session.train(
            TrainRequest(
                parent=parent, parent_version=step, output=str(work), algorithm=AlgorithmSpec(policy_loss="sft"),
                optimizer=OptimizerSpec(lr=2e-3, betas=(0.9, 0.99), lr_warmup_steps=5, total_steps=STEPS),
                demonstrations=str(work / "demonstrations.parquet"), train_batch_size=len(shown), max_steps=LEG,
            ),
            lambda event: None, lambda: False,
        )  # fmt: skip
        parent, step, loss = result.checkpoint, result.policy_version, result.metrics["loss"]
    assert loss <= LEARNED, f"loss {loss} after {step} steps"
    Path(parent).rename(target)
    shutil.rmtree(work)


@pytest.fixture(scope="session")
def agents_engine(pupil: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyEngine]:
    """A running embedded engine with the taught model."""
    from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine

    home = tmp_path_factory.mktemp("agents-engine")
    with find_or_start_engine(pupil, Home(home).cluster, EngineSpec(dtype="float32", device="cpu")) as engine:
        yield engine
        engine.shutdown()


@pytest.fixture(scope="session")
def runs(agents_engine: PolicyEngine, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``runs(stack)``: the rows of two runs of a framework's agent against the real engine, made once."""
    known: dict[str, list[RolloutRow]] = {}

    def rows(stack: str) -> list[RolloutRow]:
        required(stack)
        if stack not in known:
            known[stack] = run_agent(agents_engine, stack, tmp_path_factory.mktemp(stack), repeat_times=2)
        return known[stack]

    return rows
