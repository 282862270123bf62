"""The IO manager by which assets of other people read the rounds of a project as tables."""

from typing import Any

import dagster as dg
import pyarrow as pa

from rft_platform.common.errors import UserError
from rft_platform.experience.file_names import is_round_key, round_number
from rft_platform.resources.project import ProjectResource
from rft_platform.rounds.reporting.round_tables import as_frame, round_table


class RoundTables(dg.ConfigurableIOManager):
    """Loads rollouts, judged experiences and evaluation reports: ``def mine(judged_experiences: pd.DataFrame)``.

    An input of one round has the rows of that round. An input of several rounds, or of an asset without partitions, has
    those of all of them in one table, whose column ``round`` tells them apart.
    """

    project: dg.ResourceDependency[ProjectResource]

    def load_input(self, context: dg.InputContext) -> Any:
        """The rows as ``pandas.DataFrame`` (also without an annotation) or ``pyarrow.Table``."""
        wanted = context.dagster_type.typing_type
        name = f"{getattr(wanted, '__module__', '').partition('.')[0]}.{getattr(wanted, '__name__', wanted)}"
        if wanted is not Any and wanted is not pa.Table and name != "pandas.DataFrame":
            raise UserError(f"input {context.name}: annotated {name}; expected pandas.DataFrame or pyarrow.Table")
        rounds = [round_number(key) for key in context.asset_partition_keys if is_round_key(key)]
        table = round_table(self.project.open().store, context.asset_key.path[-1], rounds)
        return table if wanted is pa.Table else as_frame(table)

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        """Refuse: the platform's assets store their rows themselves."""
        raise UserError(f"{context.name}: this IO manager only loads the project's own assets; choose another one")
