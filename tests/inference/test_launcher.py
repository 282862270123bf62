"""What is refused before an engine starts, and how a start that fails is reported."""

import json
import os
import shutil
from pathlib import Path

import pytest

import rft_platform
from rft_platform.cluster.local.local_cluster import path_of_package
from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.inference.launch.launcher import EngineSpec, engine_service, find_or_start_engine


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def start(model: Path, **settings: object) -> None:
    home = model.parent
    find_or_start_engine(model, Home(home).cluster, EngineSpec(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer"),
        ("model.safetensors", r"no \.safetensors"),
        (".", "no such folder"),
    ],
)
def test_an_incomplete_folder(model: Path, missing: str, message: str) -> None:
    shutil.rmtree(model) if missing == "." else (model / missing).unlink()
    with pytest.raises(UserError, match=message):
        start(model)
    assert not (model.parent / "logs").exists()  # nothing was started


@pytest.mark.parametrize(("content", "message"), [("{", "not valid JSON"), ("{}", "model_type"), ("[]", "model_type")])
def test_a_broken_config(model: Path, content: str, message: str) -> None:
    (model / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        start(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "vllm"}, "vllm"),
        ({"tool_call_parser": "xml"}, "hermes"),
        ({"reasoning_parser": "xml"}, "deepseek_r1, qwen3"),
        ({"chat_template": "missing.jinja"}, "missing.jinja"),
    ],
)
def test_settings_that_cannot_be_served(model: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        start(model, **settings)


def test_the_tokenizer_decides_on_the_parser_of_thoughts(model: Path) -> None:
    def parser(given: str | None) -> str | None:
        (settings,) = engine_service(model, EngineSpec(kind="transformers", reasoning_parser=given), "engine").arguments
        chosen: str | None = json.loads(settings)["engine"]["reasoning_parser"]
        return chosen

    assert [parser(given) for given in ("auto", "qwen3", None)] == ["deepseek_r1", "qwen3", None]
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("</think>", "</thought>"))
    assert [parser(given) for given in ("auto", "qwen3")] == [None, "qwen3"]


@pytest.mark.slow
def test_an_error_of_the_server_process_is_one_line(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "no_such_architecture"}))
    with pytest.raises(UserError, match="no_such_architecture") as caught:
        start(model)
    assert "\n" not in str(caught.value)
    assert not (model.parent / "leases" / "engine.json").exists()


def test_a_home_copied_with_its_links_followed_starts_an_engine(tmp_path: Path) -> None:
    (first,) = path_of_package(tmp_path / "logs").split(os.pathsep)[:1]
    copied = tmp_path / "copy"
    shutil.copytree(tmp_path / "logs", copied)  # the link to the package becomes a folder
    (second,) = path_of_package(copied).split(os.pathsep)[:1]
    assert first != second and (Path(second) / "rft_platform").is_symlink()
    assert (Path(second) / "rft_platform").resolve() == Path(rft_platform.__file__).parent
