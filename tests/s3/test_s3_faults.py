"""Requests to S3 that fail, are slow, arrive truncated or lose their answer: nothing is lost or stored twice."""

import threading
from pathlib import Path

import pytest

from rft_platform.common.files import digest_file, write_json
from rft_platform.experience.store import ExperienceStore
from rft_platform.object_store import mirror as mirrors
from rft_platform.object_store.mirror import fetch_missing, open_mirror
from tests.experience.samples import rollouts
from tests.s3.faulty_proxy import FaultyProxy
from tests.s3.test_s3_project import assert_same_rows, assert_same_weights, make_project, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RATES = {"500": 0.06, "503": 0.06, "slow": 0.02, "truncated": 0.06, "lost": 0.06}
ROUNDS = 3


def digests(root: Path) -> dict[str, str]:
    files = [path for name in ("rounds", "checkpoints") for path in (root / name).rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix(): digest_file(path) for path in files if path.suffix != ".lock"}


@pytest.mark.parametrize("seed", range(4))
def test_everything_that_was_written_arrives_once_at_another_home(
    seed: int, tmp_path: Path, s3_endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = FaultyProxy(s3_endpoint, seed, **RATES)
    with proxy.running() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        first = tmp_path / "first"
        mirror = open_mirror(first, bucket)
        mirror.take_over()
        store = ExperienceStore(first / "rounds")
        for number in range(1, ROUNDS + 1):
            store.write_rollouts(number, 0, rollouts(round=number))
            store.write_note(number, "explore", {"rows": 4})
            folder = first / "checkpoints" / "p" / "n" / f"global_step_{number}"
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(bytes([number]) * 20_000_000)  # two parts
            write_json(folder / "manifest.json", {"round": number})
            store.write_note(number, "train-policy", {"steps": 1})
            store.write_note(number, "evaluation", {"gate": "passed"})
        mirror.finish()
        mirrors._OPEN.clear()

        second = tmp_path / "second"
        open_mirror(second, bucket).take_over()
        taken = ExperienceStore(second / "rounds")
        assert taken.rounds() == store.rounds()
        for number in taken.rounds():
            assert taken.damaged(number, digest=True) == []
            assert fetch_missing(second / "checkpoints" / "p" / "n" / f"global_step_{number}")
    assert digests(second) == digests(first)
    assert len(proxy.injected) >= 3 and proxy.injected.total() >= 5
    assert not [thread for thread in threading.enumerate() if thread.name == "upload-checkpoints"]


def test_a_run_over_broken_requests_ends_with_the_rows_and_weights_of_a_local_run(
    tmp_path: Path, tiny_model: Path, s3_endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = make_project(tmp_path / "local", tiny_model, 2)
    local.rft("run", "--config", str(local.config))
    proxy = FaultyProxy(s3_endpoint, 11, **RATES)
    with proxy.running() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        stored = make_project(tmp_path / "stored", tiny_model, 2, store_url=bucket)
        stored.rft("run", "--config", str(stored.config))
        stored.rft("stop")
    assert_same_rows(rows_of(stored), rows_of(local))
    assert_same_weights(stored, local, 2)
    assert proxy.injected.total() >= 10
    assert stored.rft("store", "check").returncode == 0
