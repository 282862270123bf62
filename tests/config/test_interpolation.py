"""Interpolation: variables, keys of the same file, messages, and literal marks in a project's own file."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft_platform.common.errors import UserError
from rft_platform.common.redaction import MASK, redact
from rft_platform.config.home import Home
from rft_platform.config.load import dump_config, escaped, interpolate, load_config, load_config_of, unescaped
from tests.support.builders import load_text

TEXT = st.lists(st.sampled_from([*"ab$\\{}:,.'\" \n", "${", "\\${"]), max_size=8).map("".join)


def test_a_variable_its_default_and_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_MODEL", "owner/model")
    monkeypatch.setenv("SOME_BATCH", "16")
    monkeypatch.delenv("SOME_ROOT", raising=False)
    text = """
name: ${model.model_path}
checkpoint_root_dir: ${oc.env:SOME_ROOT,./saved}
model: {model_path: "${oc.env:SOME_MODEL,unused}", max_model_len: "${oc.env:SOME_LENGTH,2048}"}
buffer: {batch_size: "${oc.env:SOME_BATCH}"}
algorithm: {teacher_model_path: "${model.model_path}-large"}
"""
    config = load_text(tmp_path, text)
    assert (config.name, config.model.model_path, config.model.max_model_len) == ("owner/model", "owner/model", 2048)
    assert (config.buffer.batch_size, config.algorithm.teacher_model_path) == (16, "owner/model-large")
    assert config.checkpoint_root_dir == str(tmp_path / "saved")  # as a path that is written without a variable


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (
            "${oc.env:NOT_SET_ANYWHERE}",
            "model.model_path: the environment variable NOT_SET_ANYWHERE is not set; set it, or write "
            "${oc.env:NOT_SET_ANYWHERE,DEFAULT}",
        ),
        (
            "${nothing.here}",
            "model.model_path: ${nothing.here} names a key that this file does not set; set nothing.here",
        ),
        (
            "${HOME}/model",
            "model.model_path: ${HOME} names a key that this file does not set; set HOME; an environment variable is "
            "${oc.env:HOME}",
        ),
        ("${oc.unheard_of:1}", "model.model_path: cannot be interpolated: Unsupported interpolation type"),
        ("${model.model_path}", "model.model_path: cannot be interpolated: Recursive interpolation"),
        ("${oc.env:", "model.model_path: cannot be interpolated: "),
    ],
)
def test_an_expression_without_a_value_is_refused_in_one_line(tmp_path: Path, expression: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_text(tmp_path, f"model: {{model_path: '{expression}'}}")
    assert len(str(caught.value).splitlines()) == 1
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "rft.yaml"))


@given(st.dictionaries(TEXT, TEXT | st.lists(TEXT, max_size=3) | st.none() | st.integers(), max_size=3))
def test_escaped_texts_round_trip_through_interpolation(data: dict[str, Any]) -> None:
    assert unescaped(escaped(data)) == data
    nested = {"section": data}
    assert interpolate(escaped(nested), "test") == nested


def test_a_project_keeps_values_and_literal_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_NAME", "first")
    config = load_text(tmp_path, r"{name: '${oc.env:SOME_NAME}', group: 'literal \${oc.env:SOME_NAME}'}")
    assert (config.name, config.group) == ("first", "literal ${oc.env:SOME_NAME}")
    home = Home(tmp_path / "home")
    home.root.mkdir()
    home.config_file.write_text(dump_config(config, home), encoding="utf-8")
    monkeypatch.setenv("SOME_NAME", "second")
    assert load_config_of(home) == config
    assert load_config(home.config_file) == config


@pytest.mark.parametrize(
    "name",
    [
        "DB_PASSWORD", "hf_token", "KEY", "OPENAI_API_KEY", "API_KEY_2", "SECRET_A", "TOPSECRET", "apitoken",
        "TOKEN_HF", "KEY_OPENAI", "RFT_ALERT_URL", "DB_PASS", "MYSQL_PWD",
    ],
)  # fmt: skip
def test_a_variable_with_a_secret_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "hunter2")
    text = "buffer: {explorer_input: {taskset: {path: a.jsonl, workflow_args: {login: '${oc.env:%s}'}}}}"
    with pytest.raises(
        UserError, match=r"workflow_args.login: .* would be stored as plain text: .*api_key_env"
    ) as caught:
        load_text(tmp_path, text % name)
    assert "hunter2" not in str(caught.value) and redact("hunter2") == MASK


@pytest.mark.parametrize("name", ["PWD", "OLDPWD", "MAX_TOKENS", "MAX_TOKEN_LEN_PER_GPU", "BYPASS", "PASS_RATE"])
def test_a_variable_whose_name_is_like_that_of_a_secret(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "visible")
    assert load_text(tmp_path, f"name: ${{oc.env:{name}}}").name == "visible"
    assert redact("visible") == "visible"


def test_a_variable_with_a_number_of_tokens_and_a_literal_are_no_secrets(tmp_path: Path) -> None:
    text = r"{name: '${oc.env:MAX_TOKEN_LEN,7}', group: 'literal \${oc.env:DB_PASSWORD}'}"
    config = load_text(tmp_path, text)
    assert (config.name, config.group) == ("7", "literal ${oc.env:DB_PASSWORD}")


def test_values_of_variables_have_the_types_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_RUN", "007")
    text = """
name: ${oc.env:SOME_RUN}
explorer:
  eval_interval: "${oc.env:NOT_SET,5}"
  workers: {resources: {gpu: "${oc.env:NOT_SET,2}"}, runtime_env: {env_vars: {PORT: "${oc.env:NOT_SET,8000}"}}}
trainer: {total_steps: "${oc.env:NOT_SET,100}", grad_clip: "${oc.env:NOT_SET,1.0}"}
model: {repetition_penalty: "${oc.env:NOT_SET,1.0}", tinker: {enable: "${oc.env:NOT_SET,false}"}}
algorithm:
  repeat_times: ${buffer.batch_size}
  optimizer: {lr: "${oc.env:NOT_SET,1e-5}", lr_warmup_steps_ratio: "${oc.env:NOT_SET,0.1}", clip_grad: 1.0}
buffer:
  batch_size: ${oc.env:NOT_SET,4}
  explorer_input: {taskset: {path: a.jsonl, workflow_args: {port: "${oc.env:NOT_SET,80}", day: "2026-01-02"}}}
"""
    config = load_text(tmp_path, text)
    assert (config.name, config.evaluation.every, config.trainer.total_steps) == ("007", 5, 100)
    assert (config.algorithm.optimizer.lr, config.algorithm.optimizer.lr_warmup_steps) == (1e-5, 10)
    assert (config.algorithm.repeat_times, config.buffer.batch_size) == (4, 4)
    assert config.explorer.workers.runtime_env.env_vars == {"PORT": "8000"}
    assert config.explorer.workers.resources == {"gpu": 2.0}
    assert config.buffer.explorer_input.taskset is not None
    assert config.buffer.explorer_input.taskset.workflow_args == {"port": 80, "day": "2026-01-02"}
