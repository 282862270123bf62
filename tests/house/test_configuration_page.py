"""docs/configuration.md says what the schema says, of every key."""

from scripts.configuration import PAGE, keys, page, undocumented


def test_the_page_is_that_of_the_schema() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "docs/configuration.md is out of date: run `make configuration`"


def test_every_key_has_a_description() -> None:
    assert not undocumented()


def test_keys_of_lists_optional_sections_and_aliases_are_found() -> None:
    known = {key for key, _ in keys()}
    assert {"mode", "policies[].model_path", "warm_start.optimizer.lr", "explorer.auxiliary_models[].base_url"} <= known
    assert {
        "buffer.explorer_input.taskset.judge.weight",
        "synchronizer.sync_interval",
        "model.lora_configs[].lora_rank",
    } <= known
    assert len(known) > 250
