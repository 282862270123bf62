"""The files of mode serve and mode train of one online project make one stored configuration."""

from typing import Any

import pytest

from rft_platform.common.errors import UserError
from rft_platform.config.load import build_config
from rft_platform.config.online_halves import before_joining, decided_elsewhere, joined
from rft_platform.config.schema.rft_config import RftConfig


def file_of(mode: str, **sections: Any) -> RftConfig:
    buffer = {"train_batch_size": 16, "trainer_input": {"experience_buffer": {"storage_type": "sql"}}}
    config = {"mode": mode, "project": "test", "name": "test", "algorithm": {"algorithm_type": "ppo"}, "buffer": buffer}
    for name, section in sections.items():
        old = config.get(name)
        config[name] = {**old, **section} if isinstance(old, dict) else section
    return build_config(config)


SERVING = {"explorer": {"proxy_port": 8011, "rollout_model": {"dtype": "float32"}}, "service": {"record_rate": 0.5}}
SERVE = file_of("serve", **SERVING)
TRAIN = file_of("train", buffer={"train_batch_size": 32}, trainer={"save_interval": 16}, explorer={"proxy_port": 9000})


@pytest.mark.parametrize("files", [(SERVE, TRAIN), (TRAIN, SERVE), (SERVE, TRAIN, SERVE), (TRAIN, SERVE, TRAIN)])
def test_each_half_decides_its_sections_in_any_order(files: tuple[RftConfig, ...]) -> None:
    stored: RftConfig | None = None
    for given in files:
        stored = joined(stored, given)
    assert stored is not None
    assert (stored.mode, stored.explorer.proxy_port, stored.service.record_rate) == ("both", 8011, 0.5)
    assert (stored.buffer.train_batch_size, stored.trainer.save_interval) == (32, 16)
    assert stored.online


def test_the_first_half_and_other_projects_are_stored_as_they_are() -> None:
    assert joined(None, SERVE) is SERVE and joined(SERVE, SERVE) is SERVE
    other = file_of("train", name="other")
    assert joined(SERVE, other) is other
    both = file_of("both")
    assert joined(TRAIN, both) is both


def test_keys_of_both_halves_must_agree() -> None:
    with pytest.raises(UserError, match=r"other values of model\.temperature: give these keys the same values"):
        joined(SERVE, file_of("train", model={"temperature": 0.5}))


def test_keys_without_effect_are_reported() -> None:
    whole = joined(TRAIN, SERVE)
    assert [finding.text for finding in decided_elsewhere(whole, SERVE)] == [
        "buffer.train_batch_size 16 has no effect here: the file of mode train decides it (32)"
    ]
    assert [finding.text for finding in decided_elsewhere(whole, TRAIN)] == [
        "explorer.proxy_port 9000 has no effect here: the file of mode serve decides it (8011)"
    ]
    assert [finding.text for finding in decided_elsewhere(SERVE, SERVE)] == []


def test_a_half_that_starts_for_the_first_time_changes_nothing_of_a_started_project() -> None:
    for stored, given in ((TRAIN, SERVE), (SERVE, TRAIN)):
        whole = joined(stored, given)
        assert before_joining(stored, whole).model_copy(update={"mode": "both"}) == whole
    whole = joined(TRAIN, SERVE)
    assert before_joining(whole, joined(whole, TRAIN)) == whole
