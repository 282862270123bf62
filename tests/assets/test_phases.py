"""Where a phase begins: the logs that are kept small are those of the asset's own project."""

import dagster as dg

from rft_platform.assets.run_failure import asset_phase
from rft_platform.config.home import Home
from rft_platform.resources.project import ProjectResource


def test_the_logs_of_the_assets_own_project_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setenv("RFT_LOG_MAX_BYTES", "10")
    monkeypatch.setenv("RFT_HOME", str(tmp_path / "elsewhere"))
    logs = {}
    for name in ("own", "elsewhere"):
        logs[name] = Home(tmp_path / name).logs / "driver.log"
        logs[name].parent.mkdir(parents=True)
        logs[name].write_text("more than ten bytes\n")

    @dg.asset
    def body(context: dg.AssetExecutionContext, project: ProjectResource) -> None:
        with asset_phase(context, "body", [project]):
            pass

    dg.materialize([body], resources={"project": ProjectResource(home=str(tmp_path / "own"))})
    assert {name: file.stat().st_size for name, file in logs.items()} == {"own": 0, "elsewhere": 20}
