"""``RftProjectComponent``: a training project as a component of any Dagster deployment, by a YAML of six lines.

``dg scaffold defs rft_platform.RftProjectComponent NAME`` writes it. A deployment may have many: each has its own
folder of state, and a prefix that makes the names of its assets, jobs, sensors and partitions unique.
"""

from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import BaseModel, Field, PrivateAttr, model_validator

from rft_platform.common.errors import UserError
from rft_platform.config.home import Home
from rft_platform.config.load import build_config, load_config
from rft_platform.config.paths import resolve_paths
from rft_platform.config.reference import write_with_schema
from rft_platform.config.schema.rft_config import RftConfig
from rft_platform.project_definitions import definitions_of
from rft_platform.resources.names import DagsterNames
from rft_platform.resources.project import ProjectResource
from rft_platform.rounds.project.project import Project
from rft_platform.run.start import begin, is_in_force

_STARTER = """\
# The least a run needs: a model, tasks, a judge. Every other key has a default (`rft config explain KEY`).
project: {name}
model:
  model_path: Qwen/Qwen2.5-0.5B-Instruct
buffer:
  batch_size: 8
  total_steps: 10
  explorer_input:
    taskset:
      path: openai/gsm8k
      subset_name: main
      judge: gsm8k
"""


class ConfiguredProject(ProjectResource):
    """A project with the configuration that a component names: a file, or settings in the component's YAML."""

    config: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)
    folder: str = "."  # relative paths of the settings are relative to it
    _is_checked: bool = PrivateAttr(default=False)  # Dagster makes an object of the resource for each tick and run

    def read(self) -> RftConfig:
        """The configuration. Raises UserError with a line for each problem."""
        if self.config:
            return load_config(self.config)
        folder = Path(self.folder)
        return build_config(resolve_paths(self.settings, folder), "the component's project").in_folder(folder)

    def open(self) -> Project:
        """The project; a new or changed configuration is checked and put in force first, as ``rft run`` does.

        Later stages of a run read the configuration in force: the user may be editing the file.
        """
        if not self._is_checked:
            home, config = Home(Path(self.home)), self.read()
            if not is_in_force(home, config):
                begin(home, config, service=config.online)
            self._is_checked = True
        return super().open()


class ScaffoldParams(BaseModel):
    """Options of ``dg scaffold defs rft_platform.RftProjectComponent``."""

    config: str | None = Field(default=None, description="YAML of an existing project; by default a small one is made.")
    rft_home: str | None = Field(default=None, description="Folder for the project's state; by default .rft/NAME.")
    key_prefix: str | None = Field(default=None, description="Prefix of the asset keys; by default NAME.")


class RftProjectScaffolder(dg.Scaffolder[ScaffoldParams]):
    """Writes the component's YAML, and a small configuration of a project beside it."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScaffoldParams]:
        """The options on the command line."""
        return ScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[ScaffoldParams]) -> None:
        """Write ``defs.yaml``, and ``rft.yaml`` unless the options name a file."""
        name, params = request.target_path.name, request.params
        if params.config is None:
            write_with_schema(request.target_path / "rft.yaml", _STARTER.format(name=name))
        dg.scaffold_component(
            request,
            {
                "config": params.config or "rft.yaml",
                "rft_home": params.rft_home or f".rft/{name}",
                "key_prefix": params.key_prefix or name,
            },
        )


@dg.scaffold_with(RftProjectScaffolder)
class RftProjectComponent(dg.Component, dg.Model, dg.Resolvable):
    """A reinforcement fine-tuning project: its assets, checks, jobs, sensors and schedule."""

    rft_home: str = Field(
        description="Folder for all state of the project, relative to the root of the Dagster project. Two projects "
        "must not share it."
    )
    config: str | None = Field(
        default=None, description="The project's YAML file, as for `rft run --config`; relative to the component."
    )
    project: dict[str, Any] | None = Field(
        default=None, description="The project's settings themselves, instead of `config`."
    )
    key_prefix: str | list[str] = Field(
        default="",
        description="Prefix of the asset keys, such as helper or team/helper. The names of jobs, sensors, schedules, "
        "pools and partitions begin with it. Each project of a deployment needs its own.",
    )

    @model_validator(mode="after")
    def _check_source(self) -> "RftProjectComponent":
        if (self.config is None) == (self.project is None):
            raise ValueError("give either config (the project's YAML file) or project (its settings)")
        return self

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        """What ``dg list components`` and the interface show."""
        return dg.ComponentTypeSpec(
            description="Reinforcement fine-tuning of an LLM agent: rounds of rollouts, judgements and training.",
            tags=["llm", "training"],
            produces=["asset", "asset_check", "job", "sensor", "schedule", "resource"],
        )

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The project's definitions. Raises UserError with a line for each problem of its configuration."""
        folder = context.path if context.path.is_dir() else context.path.parent
        project = ConfiguredProject(
            home=str((context.project_root / Path(self.rft_home).expanduser()).absolute()),
            config="" if self.config is None else str((folder / Path(self.config).expanduser()).absolute()),
            settings=self.project or {},
            folder=str(folder.absolute()),
        )
        if Home(Path(project.home)).root == context.project_root.absolute():
            raise UserError("rft_home is the root of the Dagster project: name a folder below it, such as .rft")
        return definitions_of(project.read(), DagsterNames.of(self.key_prefix), project)
