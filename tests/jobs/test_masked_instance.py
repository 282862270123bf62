"""What Dagster stores of a failure carries no secret, whoever raised it."""

from pathlib import Path

import dagster as dg
import pytest

from rft_platform.config.home import Home
from rft_platform.jobs.dagster_internals.masked_instance import MaskedInstance
from rft_platform.jobs.instance import open_instance

SECRET = "pa55word"


@dg.job
def leaking_job() -> None:
    """A job of Dagster's own, without any decorator of the platform."""

    @dg.op
    def leak(context: dg.OpExecutionContext) -> None:
        context.log.warning(f"about to ask http://u:{SECRET}@h")
        try:
            raise ValueError(f"inner http://u:{SECRET}@h")
        except ValueError as error:
            raise dg.Failure(f"outer http://u:{SECRET}@h", metadata={"url": f"http://u:{SECRET}@h"}) from error

    leak()


def test_no_database_of_dagster_holds_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    with open_instance(home) as instance:
        assert isinstance(instance, MaskedInstance)
        result = leaking_job.execute_in_process(instance=instance, raise_on_error=False)
        assert not result.success
        instance.add_run_tags(result.run_id, {"rft/cause": f"http://u:{SECRET}@h"})
        messages = [str(event) for event in instance.all_logs(result.run_id)]
    assert any("outer http://***@h" in message for message in messages), "the rest of the text is kept"
    assert any("inner http://***@h" in message for message in messages), "and so is the cause"
    holding = [file for file in home.root.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]
    assert holding == []
