"""The demo's model and tasks: made from code, the same every time, and honestly held out."""

import pytest

from rft_platform.common.errors import UserError
from rft_platform.recipes.tiny_model import VOCABULARY, build_model
from tests.support.recipe_projects import modules_of

(prepare,) = modules_of("arithmetic", "prepare")


def test_held_out_additions_are_not_trained_on_in_either_order():
    explored, held_out = prepare.split_additions()
    assert len(held_out) >= 500
    assert len(explored) + len(held_out) == 100 * 100
    assert not {frozenset(pair) for pair in explored} & {frozenset(pair) for pair in held_out}


def test_split_follows_from_its_seed():
    assert prepare.split_additions(3) == prepare.split_additions(3)
    assert prepare.split_additions(3) != prepare.split_additions(4)


def test_model_is_the_same_every_time_and_of_the_promised_size(tmp_path, tiny_model):
    from safetensors import safe_open

    again = build_model(tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (tiny_model / "model.safetensors").read_bytes()
    with safe_open(again / "model.safetensors", "numpy") as weights:
        count = sum(weights.get_tensor(name).size for name in weights.keys())  # noqa: SIM118
    assert 0.9e6 < count < 1.2e6


def test_a_model_that_copies_attends_to_what_followed_the_same_token_before(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    folder = build_model(tmp_path / "copies", size="700k", copies=True)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    once = torch.randperm(VOCABULARY, generator=generator)[:100]
    with torch.no_grad():
        first, second, *_ = model(torch.cat([once, once])[None], output_attentions=True).attentions
    before = first[0, 0].diagonal(offset=-1)
    assert before.mean() > 0.9
    for head in (0, 2):  # of each group of queries
        followed = second[0, head].diagonal(offset=-99)[1:]  # from a token of the repetition to the one after its first
        assert followed.mean() > 0.9


def test_only_a_folder_that_holds_a_generated_model_is_replaced(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (build_model(folder, size="700k") / "note").write_text("of an earlier model")
    assert build_model(folder, size="700k", seed=1) == folder and not (folder / "note").exists()
    (folder / "build.json").unlink()
    with pytest.raises(UserError, match="model holds something that build_model did not write: remove it, or name"):
        build_model(folder, size="700k")
    with pytest.raises(UserError, match="safetensors holds something"):
        build_model(folder / "model.safetensors")
    assert (folder / "model.safetensors").is_file()


def test_a_model_that_its_shape_does_not_allow_is_refused(tmp_path):
    with pytest.raises(UserError, match="vocabulary 200: expected at least 265"):
        build_model(tmp_path / "model", size="700k", vocabulary=200)
    with pytest.raises(UserError, match="have 320 dimensions, more than the 255 of a token"):
        build_model(tmp_path / "model", size="10m", copies=True)
    assert not list(tmp_path.iterdir())
