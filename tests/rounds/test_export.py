"""``rft models export``: the folder, its card beside the registry, the upload, and what loads the folder."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from typer.testing import CliRunner, Result

from rft_platform.cli.main import app
from rft_platform.common.digests import digest_weights
from rft_platform.common.files import read_json, write_sealed_json, write_text
from rft_platform.config.home import Home
from rft_platform.evaluation.gate import GateDecision
from rft_platform.evaluation.results import RunScore, result_of
from rft_platform.experience.record import JudgedRow
from rft_platform.inference.interface import SamplingParams
from rft_platform.model_registry.models import version_tags
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Judged, Policy, RoundEvaluation, publish, write
from rft_platform.rounds.reporting.model_card import hub_name
from rft_platform.rounds.reporting.run_log import record_evaluation, scores_of
from rft_platform.rounds.setup.connections import connect_registry
from rft_platform.training.checkpoint.manifest import describe_files
from tests.support.builders import flip_a_byte, write_rows
from tests.support.fake_hub import TOKEN, fake_hub
from tests.support.records import selected

ROWS = 5


@pytest.fixture
def project(
    tmp_path: Path, tiny_model: Path, with_mlflow: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> Project:
    """A project without rounds, whose base model has a licence."""
    home, base = tmp_path / "home", tmp_path / "base"
    shutil.copytree(tiny_model, base)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (base / "LICENSE").write_text("the licence's text")
    tasks = {"path": write_rows(tmp_path / "tasks.jsonl", [{"question": "1+1=", "answer": "2"}]), "name": "sums"}
    config = {
        "project": "shop", "name": "helper", "model": {"model_path": str(base)},
        "buffer": {"total_steps": 1, "batch_size": 1, "explorer_input": {"taskset": tasks, "eval_tasksets": [tasks]}},
    }  # fmt: skip
    write_text(Home(home).config_file, yaml.safe_dump(config))
    with_mlflow(home)
    monkeypatch.setenv("RFT_HOME", str(home))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return Project.open(Home(home))


def seal(project: Project, folder: Path, version: int, **entries: Any) -> dict[str, Any]:
    """Write the manifest of a checkpoint that was trained on the rows of round 1; returns its lineage."""
    rows = [JudgedRow(f"{row}", "group", f"run{row}", 0, 1.0, {}, "judge-1", 1.0) for row in range(ROWS)]
    project.store.write_judged(1, "judge-1", rows)
    write(project.store, 1, Judged(judge_version="judge-1", sound=True, judge_names={"judge-1": "exact_match"}))
    base = str(project.config.model.model_path)
    lineage = {
        **selected(project.store, 1), "project": "shop", "name": "helper", "algorithm": "grpo",
        "config_digest": "c" * 64, "code_version": "abc1", "workflow_code": "def2", "base_model": base,
    }  # fmt: skip
    known = {"parent": base, "parent_version": 0, "policy_version": version, "request": {"output": str(folder)}}
    written = {**known, "weights_digest": digest_weights(folder), "lineage": lineage, "files": describe_files(folder)}
    write_sealed_json(folder / "manifest.json", {**written, **entries})
    return lineage


def release(project: Project, folder: Path, version: int, lineage: dict[str, Any]) -> None:
    """Publish a checkpoint with an evaluation of 4 tasks, register and promote it."""
    registry = connect_registry(project)
    digest = digest_weights(folder)
    number = registry.register_checkpoint(
        folder, version, version_tags(lineage, digest), registry.training_run("helper").run_id
    )
    policy = Policy(str(folder), version, digest, 1, model_version=str(number))
    publish(project.store, policy)
    scores = [RunScore("sums", f"t{n}", mode, float(n < 3)) for n in range(4) for mode in ("sampled", "greedy")]
    known = {"round": 1, "policy_version": version, "tasks": 4, "tasks_digest": "t", "sampled_n": 1, "temperature": 1.0}
    counts = {"failed_runs": 0, "completion_tokens": 8, "truncated_share": 0.0, "seconds": 1.0, "seed": 0}
    result = result_of(scores, 1.0, **known, **counts, measured_by="m")
    decision = GateDecision(True, "better than the start")
    write(project.store, 1, RoundEvaluation(gate=decision.reason, promoted=True, results=[result]))
    record_evaluation(project, registry, policy, scores_of(result, []), decision.reason, [result])
    registry.promote(number)


@pytest.fixture
def full(project: Project) -> Path:
    """The champion, policy version 4: full weights, beside the files of a trainer."""
    folder = project.checkpoints / "global_step_4"
    shutil.copytree(str(project.config.model.model_path), folder, ignore=shutil.ignore_patterns("README.md", "LICENSE"))
    (folder / "trainer_state").mkdir()
    (folder / "trainer_state" / "optimizer.safetensors").write_bytes(b"moments")
    write_text(folder / "steps.json", "[]")
    release(project, folder, 4, seal(project, folder, 4))
    return folder


@pytest.fixture
def adapter(project: Project) -> Path:
    """The champion, policy version 8: a LoRA adapter of random weights over the base model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base, folder = Path(str(project.config.model.model_path)), project.checkpoints / "global_step_8"
    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(folder)
    for file in [*base.glob("tokenizer*"), base / "chat_template.jinja"]:
        shutil.copy(file, folder)
    lineage = seal(project, folder, 8, base_model=str(base), base_digest=digest_weights(base))
    release(project, folder, 8, lineage)
    return folder


def export(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["models", "export", *map(str, arguments)])


def logits_of(folder: Path, adapter: Path | None = None) -> Any:
    """The logits of a fixed prompt; the model is loaded by transformers, and an adapter by peft."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    ids = AutoTokenizer.from_pretrained(folder)("12+30=", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.slow
def test_the_figures_of_the_card_are_those_of_the_registry(full: Path, project: Project, tmp_path: Path) -> None:
    done = export("shop-helper@champion", "--merged", tmp_path / "out")
    assert done.exit_code == 0, done.output

    card, registry = ModelCard.load(tmp_path / "out" / "README.md"), connect_registry(project)
    tags = registry.resolve("models:/shop-helper@champion").tags
    scores = {each.metric_type: each.metric_value for each in card.data.eval_results}
    assert {name: repr(scores[name]) for name in ("sampled_pass", "greedy_pass")} == {
        name: tags[name] for name in ("sampled_pass", "greedy_pass")
    }
    assert {each.dataset_name for each in card.data.eval_results} == {"sums"}
    assert "| sums | 4 | sampled_pass | 75.0% (" in card.text and "passed (reward >= 1)" in card.text
    for name in ("algorithm", "config_digest", "code_version", "workflow_code", "weights_digest"):
        assert tags[name] in card.text, name
    assert f"| rows trained on | {ROWS} |" in card.text and "exact_match (`judge-1`)" in card.text
    assert f"Gate: {tags['gate']}." in card.text
    assert (card.data.license, card.data.base_model) == ("apache-2.0", None), "a folder is no name on the hub"
    assert "base model | `base` |" in card.text and str(tmp_path) not in card.content


@pytest.mark.slow
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_verified_trace_fails_if_the_rows_have_changed(full: Path, project: Project, form: list[str]) -> None:
    command = ["trace", "models:/shop-helper@champion", "--verify", *form]
    assert (same := CliRunner().invoke(app, command)).exit_code == 0, same.output
    row = JudgedRow("0", "group", "run0", 0, 0.5, {}, "judge-1", 1.0)
    project.store.write_judged(1, "judge-1", [row])
    changed = CliRunner().invoke(app, command)
    assert changed.exit_code == 1
    assert ('"data_unchanged": false' if form else "its rows have CHANGED since") in changed.stdout


@pytest.mark.slow
def test_a_version_with_full_weights_is_copied_without_the_trainers_files(full: Path, tmp_path: Path) -> None:
    done = export(4, "--merged", tmp_path / "out")
    assert done.exit_code == 0, done.output
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "LICENSE"} < names
    assert not names & {"trainer_state", "steps.json", "manifest.json", "MLmodel", "components", "requirements.txt"}
    assert digest_weights(tmp_path / "out") == digest_weights(full) and digest_weights(full) in done.output
    assert (logits_of(tmp_path / "out") == logits_of(full)).all()


@pytest.mark.slow
def test_the_candidate_is_the_newest_version_also_if_the_gate_refused_it(
    full: Path, project: Project, tmp_path: Path
) -> None:
    newer, registry = full.with_name("global_step_6"), connect_registry(project)
    shutil.copytree(full, newer)
    (newer / "manifest.json").unlink()
    tags = version_tags(seal(project, newer, 6), digest_weights(newer))
    registry.register_checkpoint(newer, 6, tags, registry.training_run("helper").run_id)
    for alias, version in (("champion", 4), ("candidate", 6)):
        done = export(f"shop-helper@{alias}", "--merged", tmp_path / alias)
        assert done.exit_code == 0 and f"{alias}: policy version {version}, " in done.output, done.output


@pytest.mark.slow
def test_an_adapter_is_merged(adapter: Path, project: Project, tmp_path: Path) -> None:
    import torch

    out, base = tmp_path / "out", Path(str(project.config.model.model_path))
    done = export("models:/shop-helper@champion", "--merged", out)
    assert done.exit_code == 0, done.output
    assert not list(out.glob("adapter*")) and read_json(out / "config.json")["dtype"] == "float32"
    expected = logits_of(base, adapter)
    torch.testing.assert_close(logits_of(out), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits_of(base), expected, atol=1e-2)
    assert f"sha256 `{digest_weights(out)}`, LoRA adapter merged" in (out / "README.md").read_text()


@pytest.mark.slow
def test_an_adapter_needs_the_weights_that_it_was_trained_on(adapter: Path, project: Project, tmp_path: Path) -> None:
    flip_a_byte(Path(str(project.config.model.model_path)) / "model.safetensors")
    done = export(8, "--merged", tmp_path / "out")
    assert done.exit_code != 0 and "other weights than the adapter" in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_refused_exports(full: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("mine")
    assert "name a new folder" in export(4, "--merged", tmp_path / "used").output
    assert (tmp_path / "used" / "mine").read_text() == "mine"
    out = tmp_path / "out"
    assert "no policy version 5" in export(5, "--merged", out).output
    assert "has versions 1..1 and aliases" in export("shop-helper@best", "--merged", out).output
    assert "expected hub:ORG/NAME" in export(4, "--merged", out, "--push", "ftp:a/b").output
    assert "expected hub:ORG/NAME" in export(4, "--merged", out, "--push", "hub:shop").output
    assert "set HF_TOKEN" in export(4, "--merged", out, "--push", "hub:team/shop").output
    assert not out.exists(), "an upload that cannot work is refused before the weights are written"
    flip_a_byte(full / "model.safetensors")
    damaged = export(4, "--merged", out)
    assert damaged.exit_code != 0 and "was changed after it was written" in damaged.output and not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("token", [TOKEN, "hf_of_somebody_else"])
def test_an_export_is_uploaded_to_a_hub(token: str, full: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "rft_platform", "models", "export", "4", "--merged", str(out), "--push"]
    with fake_hub() as hub:
        variables = {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": token,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(tmp_path / "hf"),
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | variables
        done = subprocess.run([*command, "hub:team/shop"], env=environment, capture_output=True, text=True, timeout=120)
    if token != TOKEN:
        assert done.returncode == 2 and f"hf upload team/shop {out}" in done.stderr and not hub.files
        assert token not in done.stdout + done.stderr and out.is_dir()
        return
    assert done.returncode == 0, done.stderr
    assert f"{hub.url}/team/shop/commit/1" in done.stdout
    (created,) = hub.created
    assert (created["organization"], created["name"]) == ("team", "shop")
    assert created.get("private") is True or created.get("visibility") == "private"
    assert hub.files == {file.name: file.read_bytes() for file in out.iterdir()}


def test_vllm_loads_an_export(full: Path, vllm_python: Path, tmp_path: Path) -> None:
    from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine
    from rft_platform.inference.vllm_engine.server_settings import VllmOptions

    out = tmp_path / "out"
    assert export(4, "--merged", out).exit_code == 0
    options = VllmOptions(kv_cache_gb=0.25, gpu_memory_utilization=0.2, enforce_eager=True)
    spec = EngineSpec(kind="vllm", python=str(vllm_python), vllm=options)
    with find_or_start_engine(out, Home(tmp_path / "engine").cluster, spec) as engine:
        assert engine.status().weights_digest == digest_weights(full)
        (answer,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))
        assert answer.completions[0].token_ids
        engine.shutdown()


@pytest.mark.parametrize(
    ("base_model", "name"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a0", "Qwen/Qwen3-0.6B"),
        ("/models/Qwen3-0.6B", None),
        ("/Qwen3", None),
    ],
)
def test_a_base_model_of_the_hub_is_named(base_model: str, name: str | None) -> None:
    assert hub_name(base_model) == name
