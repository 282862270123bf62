"""The demo's model and tasks: made from code, the same every time, and honestly held out."""

from rft_platform.recipes.tiny_model import build_model
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


def test_a_small_output_scale_changes_the_output_projections_alone(tmp_path, tiny_model):
    from safetensors.numpy import load_file

    scaled = build_model(tmp_path / "scaled", output_scale=0.1, rope_theta=1000.0)
    usual, changed = load_file(tiny_model / "model.safetensors"), load_file(scaled / "model.safetensors")
    for name, weights in usual.items():
        factor = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        assert abs(changed[name] - factor * weights).max() < 1e-6, name
    assert "1000.0" in (scaled / "config.json").read_text()
