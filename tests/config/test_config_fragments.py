"""The YAML that other systems print: it parses word for word, and a plan or the exact reason against it follows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rft_platform.algorithms.presets import PRESETS
from rft_platform.common.errors import UserError
from rft_platform.config.dry_run import render_plan
from rft_platform.config.home import Home
from rft_platform.config.load import load_config
from rft_platform.config.resolve import resolve
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.online.releases.shared_place import EXCHANGE_KEY
from rft_platform.run.checks import check_run

PRINTED = Path(__file__).with_name("data")
MakeConfig = Callable[..., RftConfig]


def completed(name: str, folder: Path, model: Path, **replaced: str) -> RftConfig:
    """A printed file whose placeholders are filled in, and nothing else is changed."""
    text = (PRINTED / name).read_text(encoding="utf-8")
    filled = text.replace("/path/to/your/model", str(model)).replace("CHECKPOINT_ROOT_DIR", str(folder / "saved"))
    for old, new in replaced.items():
        filled = filled.replace(old.replace("__", ": "), new)
    path = folder / name
    path.write_text(filled, encoding="utf-8")
    return load_config(path)


def test_the_explorer_service_parses() -> None:
    config = load_config(PRINTED / "explorer_service.yaml")
    assert (config.mode, config.model.temperature, config.cluster.gpu_per_node) == ("serve", 0.7, 4)
    serving = config.explorer.rollout_model
    assert (serving.engine_num, serving.tensor_parallel_size, serving.dtype, serving.seed) == (2, 2, "bfloat16", 42)
    assert serving.tool_call_parser == "hermes"
    assert (config.explorer.service_status_check_interval, config.explorer.proxy_port) == (10, 8010)
    assert config.buffer.trainer_input.experience_buffer.storage_type == "sql"
    assert config.monitor.monitor_type == ("tensorboard",)


def test_the_trainer_service_parses() -> None:
    config = load_config(PRINTED / "trainer_service.yaml")
    assert (config.mode, config.buffer.train_batch_size, config.trainer.save_interval) == ("train", 32, 16)
    assert (config.trainer.save_hf_checkpoint, config.trainer.max_checkpoints_to_keep) == ("always", 5)


@pytest.mark.parametrize("name", ["react_agent.yaml", "react_agent_zh.yaml"])
def test_the_agent_sections_parse_and_mean_the_same_algorithm(name: str) -> None:
    config = load_config(PRINTED / name)
    serving = config.explorer.rollout_model
    assert serving.enable_thinking
    assert (serving.tool_call_parser, serving.reasoning_parser) == ("hermes", "deepseek_r1")
    assert (config.synchronizer.sync_style, config.synchronizer.sync_interval) == ("dynamic_by_explorer", 2)
    assert resolve(config).algorithm.advantage == PRESETS["multi_step_grpo"].advantage


@pytest.fixture(autouse=True)
def key_of_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXCHANGE_KEY, "k" * 32)


@pytest.mark.parametrize("name", ["explorer_service.yaml", "trainer_service.yaml"])
def test_a_host_without_the_key_of_both_hosts_does_not_start(
    name: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(EXCHANGE_KEY)
    with pytest.raises(UserError) as refused:
        check_run(Home(tmp_path / "home"), completed(name, tmp_path, tiny_model), service=True)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{EXCHANGE_KEY} is not set: ")


@pytest.mark.parametrize("name", ["explorer_service.yaml", "trainer_service.yaml"])
def test_placeholders_are_named_one_by_one(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        check_run(Home(tmp_path / "home"), load_config(PRINTED / name), dry=True)
    root, model = str(refused.value).splitlines()
    assert root.startswith("checkpoint_root_dir CHECKPOINT_ROOT_DIR: is not an absolute path; give")
    assert model.startswith("model.model_path /path/to/your/model: is a placeholder; give a model folder")


def test_the_plan_of_a_service_names_its_work_and_its_command(tmp_path: Path, tiny_model: Path) -> None:
    config = completed("explorer_service.yaml", tmp_path, tiny_model)
    plan = render_plan(check_run(Home(tmp_path / "home"), config, dry=True))
    assert "service    online service at 127.0.0.1:8010" in plan
    assert f"the service takes new versions of this RFT_HOME at once, those of another host by {tmp_path}" in plan
    assert "service_status_check_interval" not in plan
    assert "start it with `rft serve --config FILE`" in plan
    with pytest.raises(UserError, match=r"mode serve .* start it with `rft serve --config FILE`"):
        check_run(Home(tmp_path / "home"), config)
    assert "rft serve" not in render_plan(check_run(Home(tmp_path / "home"), config, service=True))


def test_the_plan_follows_the_keys_of_a_file_not_its_comments(tmp_path: Path, tiny_model: Path) -> None:
    config = completed("trainer_service.yaml", tmp_path, tiny_model)
    plan = render_plan(check_run(Home(tmp_path / "home"), config, service=True))
    assert "round k collects rows when 32 are committed" in plan  # the comment beside it says 16
    assert "a checkpoint every 16 steps" in plan  # "every step"
    assert "trainer.trainer_config.trainer has no effect here, since" in plan


def test_the_error_on_a_machine_with_fewer_gpus_names_their_number(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match=r"cluster.gpu_per_node 4: this machine has 2 GPUs; set it to 2") as refused:
        check_run(Home(tmp_path / "home"), completed("explorer_service.yaml", tmp_path, tiny_model), dry=True)
    assert len(str(refused.value).splitlines()) == 1
    two = completed("explorer_service.yaml", tmp_path, tiny_model, gpu_per_node__4="gpu_per_node: 2")
    with pytest.raises(
        UserError, match=r"tensor_parallel_size 2 \* engine_num 2 needs 4 devices, and 2 are available: lower"
    ):
        check_run(Home(tmp_path / "home"), two, dry=True)
