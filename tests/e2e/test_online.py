"""Online training by real processes: customers are served, rate and commit; rounds train; nothing fails meanwhile."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from rft_platform.config.home import Home
from rft_platform.experience.record import row_id
from rft_platform.online.project import open_project
from rft_platform.online.traffic.database import COMMITTED, CONSUMED, FORGOTTEN, LABELLED, STALE, Call
from rft_platform.online.traffic.project_traffic import traffic_store
from rft_platform.online.traffic.store import TrafficStore
from rft_platform.recipes.recipe import recipe_named
from tests.support.ports import free_port
from tests.support.recipe_projects import modules_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1700)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("online") / "home")


@pytest.fixture(scope="module")
def outcome(home: Home) -> Any:
    """The demo, ended at two thirds of right answers: customers of three departments begin with a third."""
    folder = home.root.with_name("front-desk")
    recipe_named("front-desk").write(folder)
    config = folder / "rft.yaml"
    text = config.read_text().replace("proxy_port: 8010", f"proxy_port: {free_port()}")
    config.write_text(text.replace("seed: 1", "seed: 3"))
    (demo,) = modules_of(folder, "demo")
    return demo.run(home.root, goal=0.66, limit_s=1200.0)


@pytest.fixture(scope="module")
def traffic(outcome: Any, home: Home) -> TrafficStore:
    return traffic_store(open_project(home))


def test_the_success_rate_rises_and_no_request_fails_during_weight_updates(outcome: Any) -> None:
    assert outcome.failures == []
    assert outcome.updates >= 1
    assert outcome.before <= 0.5
    assert outcome.after >= 0.66


def test_every_acknowledged_rating_is_in_the_database(outcome: Any, traffic: TrafficStore) -> None:
    calls = {call.msg_id: call for call in traffic.calls(outcome.rated)}
    assert calls.keys() == set(outcome.rated)
    assert {call.state for call in calls.values()} <= {LABELLED, COMMITTED, CONSUMED, STALE}


def test_every_consumed_row_is_in_the_parquet_files_of_one_round(
    outcome: Any, traffic: TrafficStore, home: Home
) -> None:
    store = open_project(home).store
    consumed: list[Call] = [call for call in traffic.calls(outcome.rated) if call.state == CONSUMED]
    expected = {
        row_id(call.msg_id, 0, call.choice): (call.batch, call.reward, call.policy_version) for call in consumed
    }
    found = [row for number in store.rounds() if number for row in store.rollout_rows(number)]
    assert len(found) == len(expected) > 0
    assert {row.row_id: (row.round, row.run_reward, row.call.policy_version) for row in found} == expected


def test_a_consumed_row_is_traced_to_the_weights_that_were_trained_on_it(
    outcome: Any, traffic: TrafficStore, home: Home
) -> None:
    call = next(call for call in traffic.calls(outcome.rated) if call.state == CONSUMED and call.batch == 1)
    trace = rft(home, "trace", row_id(call.msg_id, 0, call.choice), "--json")
    assert trace["round"] == 1
    assert [checkpoint["round"] for checkpoint in trace["trained"]] == [1]


def test_forget_erases_a_customer_and_lists_the_trained_versions(
    outcome: Any, traffic: TrafficStore, home: Home
) -> None:
    found = rft(home, "forget", "--subject", "customer-0", "--json")
    assert found["rows"] == traffic.counts()[FORGOTTEN] > 0
    assert {checkpoint["round"] for checkpoint in found["trained"]} >= {1}
    rows = open_project(home).store.rollout_rows(1)
    assert 0 < sum(not row.call.messages for row in rows) < len(rows)


def rft(home: Home, *arguments: str) -> Any:
    """What ``rft ... --json`` prints."""
    command = [sys.executable, "-P", "-m", "rft_platform", *arguments]
    environment = {**os.environ, "RFT_HOME": str(home.root), "NO_COLOR": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
