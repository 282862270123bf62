"""How models lie on the ranks: layouts change what a step costs, not what it computes."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

import rft_platform
from rft_platform.algorithms.spec import AlgorithmSpec, LoraSpec
from rft_platform.cluster.interface import Group
from rft_platform.cluster.local.local_cluster import command_of
from rft_platform.common.errors import UserError
from rft_platform.training.data.samples import demonstration_sample
from rft_platform.training.distributed import Ranks
from rft_platform.training.join import node_service
from rft_platform.training.launch import trainer_service
from rft_platform.training.loop.gradients import accumulate_gradients
from rft_platform.training.models.critic import load_critic
from rft_platform.training.models.loading import check_tied, load_policy
from rft_platform.training.packed.packed_policy import score
from rft_platform.training.protocol import Layout
from tests.support.builders import load_text

SFT = AlgorithmSpec(policy_loss="sft")


def gradients(folder: Path, ranks: Ranks, budget: int = 4096, **options) -> dict[str, torch.Tensor]:
    """Of one SFT step over rows that share prompts; float32."""
    policy = load_policy(folder, ranks, options.pop("dtype", torch.float32), **options)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 500, 30).tolist() for _ in range(4)]
    rows = [[*prompts[n % 4], *rng.integers(5, 500, 20 + n).tolist()] for n in range(16)]
    samples = [demonstration_sample(str(n), ids, np.arange(len(ids)) >= 30) for n, ids in enumerate(rows)]
    accumulate_gradients(policy, samples, SFT, max_tokens_per_pack=budget)
    found = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys() and one
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4, alpha=8)], ids=["full", "lora"])
def test_gradient_checkpointing_gives_the_same_gradients(tiny_model, ranks, lora) -> None:
    again = replace(ranks, layout=Layout(gradient_checkpointing=True))
    calls: list[nn.Module] = []
    hook = nn.modules.module.register_module_forward_pre_hook(lambda module, args: calls.append(module))
    try:
        plain = gradients(tiny_model, ranks, lora=lora)
        once = sum(type(module).__name__.endswith("MLP") for module in calls)
        calls.clear()
        checkpointed = gradients(tiny_model, again, lora=lora)
        twice = sum(type(module).__name__.endswith("MLP") for module in calls)
    finally:
        hook.remove()
    assert twice == 2 * once
    assert_same(checkpointed, plain, 1e-6)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4, alpha=8)], ids=["full", "lora"])
def test_sums_over_ranks_once_a_step_give_the_same_gradients(tiny_model, ranks, lora) -> None:
    options = {"dtype": torch.bfloat16, "budget": 100, "lora": lora}
    once = gradients(tiny_model, replace(ranks, layout=Layout(reduce_once=True)), **options)
    assert_same(once, gradients(tiny_model, ranks, **options), 1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of what torch itself does while it traces
def test_compiled_layers_give_the_same_gradients(tiny_model, ranks) -> None:
    compiled = gradients(tiny_model, replace(ranks, layout=Layout(compile=True)))
    assert_same(compiled, gradients(tiny_model, ranks), 1e-5)


@pytest.mark.slow
def test_mixed_precision_keeps_float32_masters_and_sums(tiny_model, ranks) -> None:
    policy = load_policy(tiny_model, ranks, torch.bfloat16)
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in policy.parameters())
    exact, rounded = gradients(tiny_model, ranks), gradients(tiny_model, ranks, dtype=torch.bfloat16)
    for name, gradient in exact.items():
        assert rounded[name].dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(gradient.ravel(), rounded[name].ravel(), dim=0) > 0.98


@pytest.mark.slow
def test_an_adapter_trains_in_float32_on_a_base_model_in_bfloat16(tiny_model, ranks) -> None:
    policy = load_policy(tiny_model, ranks, torch.bfloat16, lora=LoraSpec(rank=4, alpha=8))
    adapter = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert adapter
    for name, parameter in policy.named_parameters():
        assert parameter.dtype == (torch.float32 if name in adapter else torch.bfloat16), name
    spec = LoraSpec(rank=4, alpha=8)
    exact, rounded = (gradients(tiny_model, ranks, dtype=dtype, lora=spec) for dtype in (torch.float32, torch.bfloat16))
    for name, gradient in exact.items():
        assert rounded[name].dtype == torch.float32
        if gradient.norm():  # of half of the matrices it is 0 at first
            assert torch.nn.functional.cosine_similarity(gradient.ravel(), rounded[name].ravel(), dim=0) > 0.98, name


@pytest.mark.slow
def test_a_frozen_model_scores_the_same_whether_its_weights_are_rounded_when_loaded_or_when_used(
    tiny_model, ranks
) -> None:
    ids = np.random.default_rng(0).integers(5, 500, 60).tolist()
    sample = demonstration_sample("0", ids, np.arange(60) > 0)
    once, twice = (
        score(load_policy(tiny_model, ranks, torch.bfloat16, trained=trained), [sample], max_tokens_per_pack=4096)
        for trained in (False, True)
    )
    np.testing.assert_array_equal(once[0], twice[0])


def test_tied_embeddings_stay_one_tensor_and_an_untied_one_is_refused(tiny_model, ranks) -> None:
    for dtype in (torch.float32, torch.bfloat16):  # unsharded and sharded
        causal = load_policy(tiny_model, ranks, dtype).causal
        assert causal.get_input_embeddings().weight is causal.get_output_embeddings().weight
    causal.lm_head = nn.Linear(8, 8, bias=False)
    with pytest.raises(UserError, match="ties embedding and LM head"):
        check_tied(causal, tiny_model)


def test_a_model_folder_without_all_weights_is_refused(tiny_model, ranks, tmp_path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    whole = load_file(tiny_model / "model.safetensors")
    lacking = {key: value for key, value in whole.items() if key != name}
    for number, tensors in enumerate((lacking, whole | {name: torch.zeros(3, 3)})):
        folder = shutil.copytree(tiny_model, tmp_path / str(number))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=f"safetensors files lack {name} in the shape"):
            load_policy(folder, ranks, torch.float32)
    (folder / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot load a causal LM from it"):
        load_policy(folder, ranks, torch.float32)
    with pytest.raises(UserError, match="cannot make a value model of it"):
        load_critic(folder, ranks, torch.float32)


def test_layers_are_compiled_by_default_on_gpus_below_float32() -> None:
    assert Layout().compiles("cuda", float32=False)
    assert not Layout().compiles("cuda", float32=True)
    assert not Layout().compiles("cpu", float32=False)
    assert Layout(compile=True).compiles("cpu", float32=True)
    assert not Layout(compile=False).compiles("cuda", float32=False)


def test_offload_needs_a_gpu() -> None:
    with pytest.raises(UserError, match="without a GPU turn it off"):
        Layout(cpu_offload=True).check("cpu")


def test_command_lines_of_one_rank_of_one_node_and_of_several() -> None:
    def line(group: Group, node_rank: int = 0) -> list[str]:
        return command_of(trainer_service(layout=Layout("bfloat16", cpu_offload=True), group=group), node_rank)[1:]

    *words, options = line(Group())
    assert words == ["-P", "-m", "rft_platform.training.service.worker"]
    assert json.loads(options)["layout"] == {
        "reduce_dtype": "bfloat16", "reduce_once": False, "cpu_offload": True, "gradient_checkpointing": False,
        "frees_gpu": False, "compile": None,
    }  # fmt: skip
    assert "--standalone" in line(Group(8))
    second = line(Group(8, 2, "trainer-0:29500"), node_rank=1)
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=trainer-0", "--master-port=29500"} < set(second)
    with pytest.raises(UserError, match=r"trainer\.rendezvous\.endpoint is 'trainer-0'"):
        trainer_service(group=Group(1, 2, "trainer-0"))


@pytest.mark.parametrize(
    ("cluster", "trainer", "expected"),
    [
        ("{kind: ray, node_num: 2}", "{}", "Ray starts the trainer on every node"),
        ("{node_num: 2}", "{}", r"trainer\.rendezvous\.endpoint is None, .*set cluster\.node_num"),
        ("{node_num: 1}", "{rendezvous: {endpoint: 'a:1'}}", r"cluster\.node_num is 1 .*only the first node trains"),
        ("{node_num: 2}", "{rendezvous: {endpoint: 'a:1'}}", "expected a node rank from 1 to 1"),
    ],
)
def test_a_node_that_is_not_in_the_group_cannot_join(tiny_model, tmp_path, cluster, trainer, expected) -> None:
    text = f"{{project: p, name: n, model: {{model_path: {tiny_model}}}, cluster: {cluster}, trainer: {trainer}}}"
    with pytest.raises(UserError, match=expected):
        node_service(load_text(tmp_path, text), 2)


def test_a_change_of_any_module_makes_another_trainer_group(tmp_path, monkeypatch) -> None:
    (tmp_path / "openai_api").mkdir()
    for name in ("__init__.py", "openai_api/templates.py"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1, 1))
    monkeypatch.setattr(rft_platform, "__file__", str(tmp_path / "__init__.py"))
    before = trainer_service().digest
    os.utime(tmp_path / "openai_api/templates.py", (2, 2))
    assert trainer_service().digest != before
