"""``collect_job``: committed traffic and corrections become assets of a round, also when it is launched again."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from rft_platform.assets import experiences, online, round_lock
from rft_platform.config.home import Home
from rft_platform.online.project import open_project
from rft_platform.online.traffic.incoming import ENGINE, TEMPLATE_HASH, NewCall, NewFeedback
from rft_platform.online.traffic.project_traffic import traffic_store
from rft_platform.resources.names import PLAIN_NAMES
from rft_platform.resources.project import ProjectResource, RoundTables
from rft_platform.rounds.project.project import Project
from rft_platform.rounds.project.record import Policy, publish


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An online project with four committed rows; one was corrected."""
    home = tmp_path / ".rft"
    home.mkdir()
    config = {
        "model": {"model_path": str(tiny_model), "max_model_len": 64},
        "algorithm": {"algorithm_type": "reinforce++"},
        "buffer": {"train_batch_size": 4, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}},
    }
    (home / "rft.yaml").write_text(json.dumps(config))
    monkeypatch.setenv("RFT_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    project = open_project(Home(home))
    publish(project.store, Policy(str(tiny_model), 0, "0" * 64, round=0))
    traffic = traffic_store(project)
    for number in range(4):
        recorded = {
            "msg_id": f"m{number}", "prompt_ids": [1, 2], "response_ids": [3], "rollout_logprobs": [-0.5],
            "finish_reason": "stop", "temperature": 1.0, "top_p": 1.0, "top_k": -1, "tools": [], "policy_version": 0,
            "messages": [{"role": "user", "content": "?"}], "response": {"role": "assistant", "content": "x"},
            ENGINE: "transformers", TEMPLATE_HASH: "t",
        }  # fmt: skip
        traffic.record([NewCall(f"m{number}", 0, recorded, 0, 3, time.time())])
        correction = "better" if number == 0 else None
        traffic.give_feedback(NewFeedback(f"f{number}", [f"m{number}"], number / 4, correction=correction))
    traffic.commit()
    return project


@pytest.fixture(autouse=True)
def own_locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rounds are held until the process ends; here until the test does."""
    held: dict[Path, Any] = {}
    monkeypatch.setattr(round_lock, "_round_locks", held)
    yield
    for lock in held.values():
        lock.stream.close()


@pytest.mark.filterwarnings("ignore:InitResourceContext.dagster_run is deprecated")  # Dagster's own use of it
def test_rows_and_demonstrations_of_a_round_are_materialised(project: Project) -> None:
    defined = [online.online_experiences, online.online_demonstrations, experiences.judged_experiences]
    assets = [asset.of(PLAIN_NAMES) for asset in defined]
    opened = ProjectResource(home=str(project.home.root))
    resources = {"project": opened, "tables": RoundTables(project=opened)}
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(str(PLAIN_NAMES.rounds.name), ["r0001"])
        for _ in range(2):
            done = dg.materialize(
                assets, instance=instance, partition_key="r0001", resources=resources, raise_on_error=True
            )
            assert done.success
            counts = {
                event.asset_key.to_user_string(): event.materialization.metadata["dagster/partition_row_count"].value
                for event in done.get_asset_materialization_events()
                if event.asset_key and "dagster/partition_row_count" in event.materialization.metadata
            }
            assert (counts["online_experiences"], counts["online_demonstrations"]) == (4, 1)
