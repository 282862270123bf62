"""Preferences of people become pairs, DPO trains on them, and its checkpoint serves a canary of the online project."""

import json
import time
from pathlib import Path

import pytest

from rft_platform.config.home import Home
from rft_platform.inference.launch.launcher import EngineSpec, find_or_start_engine
from rft_platform.model_registry.manifests import read_manifest
from rft_platform.online.project import open_project
from rft_platform.online.releases.versions import policy_of_version
from rft_platform.online.traffic.incoming import NewCall
from rft_platform.online.traffic.preferences import PreferenceStore
from rft_platform.online.traffic.project_traffic import traffic_database, traffic_store
from rft_platform.rounds.project.policy import deploy
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, publish
from tests.e2e.conftest import ProjectFolder, small_config

pytestmark = pytest.mark.slow
PAIRS = 8


def test_preferences_become_weights_that_serve_a_canary(make_project, tmp_path: Path, tiny_model: Path) -> None:
    online = ProjectFolder(tmp_path / "home", tmp_path / "rft.yaml")
    online.home.mkdir()
    buffer = {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}}
    settings = small_config(tmp_path, tiny_model) | {"algorithm": {"algorithm_type": "reinforce++"}, "buffer": buffer}
    (online.home / "rft.yaml").write_text(json.dumps(settings))
    project = open_project(Home(online.home))
    publish(project.store, Policy(str(tiny_model), 0, "0" * 64, round=0))
    prefer_sums(project)
    file = tmp_path / "pairs.jsonl"
    online.rft("store", "preferences", str(file))
    assert len(file.read_text().splitlines()) == PAIRS

    columns = {"prompt_type": "messages", "prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}
    dpo = make_project(
        "preferred",
        mode="train",
        algorithm={"algorithm_type": "dpo", "optimizer": {"lr": 1e-3}},
        buffer={
            "train_batch_size": PAIRS, "total_steps": 4,
            "trainer_input": {"experience_buffer": {"path": str(file), "format": columns}},
            "explorer_input": {"eval_tasksets": []},
        },
    )  # fmt: skip
    dpo.rft("run", "--config", str(dpo.config), timeout=500)
    trained = dpo.note(1, "policy")

    imported = online.json("models", "import", trained["folder"])
    version = imported["policy_version"]
    assert (imported["weights_digest"], imported["model_version"]) == (trained["weights_digest"], "1")
    origin, copy = (read_manifest(Path(folder)) for folder in (trained["folder"], imported["folder"]))
    assert copy.lineage == origin.lineage and copy.parent_folder == origin.parent_folder
    assert len(online.json("trace", imported["folder"])["trainings"]) == 1
    online.rft("models", "canary", str(version), "--share", "0.2")
    status = online.json("models", "list")
    assert (status["release"]["candidate_version"], status["versions"][-1]["traffic"]) == (version, 0.2)

    policy = policy_of_version(project, version)
    assert policy is not None
    engine = find_or_start_engine(
        tiny_model, Home(online.home).cluster, EngineSpec(dtype="float32", device="cpu"),
        name="candidate",
    )  # fmt: skip
    try:
        deploy(engine, policy)
        assert (engine.status().policy_version, engine.status().weights_digest) == (version, trained["weights_digest"])
    finally:
        engine.shutdown()


def prefer_sums(project: Project) -> None:
    """Record pairs of answers, and prefer the sum to the difference."""
    traffic, preferences = traffic_store(project), PreferenceStore(traffic_database(project))
    for number in range(PAIRS):
        question = [{"role": "user", "content": f"{number}+1="}]
        for choice, text in enumerate((str(number + 1), str(number - 1))):
            answer = {"messages": question, "tools": [], "response": {"role": "assistant", "content": text}}
            traffic.record([NewCall(f"m{number}", choice, answer, 0, 5, time.time())])
    for _ in range(PAIRS):
        pair = preferences.next_pair()
        assert pair is not None
        better = "left" if int(pair.left_text) > int(pair.right_text) else "right"
        preferences.pick(pair.left, pair.right, better)
