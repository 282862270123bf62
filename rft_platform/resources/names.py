"""The names of a project in a Dagster deployment: unique among several projects if each has a prefix.

Asset keys, jobs, sensors, schedules, pools, partitions, ops and resources are defined under plain names;
``DagsterNames`` gives them those of one project. A home that has its own Dagster instance has no prefix.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import TypeVar

import dagster as dg

from rft_platform.common.errors import UserError

_Result = TypeVar("_Result")
_PART = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
PARTITION_TAG = "dagster/partition"  #: Dagster's tag of a run with its partition
_JOINT = "__"  # Dagster joins the parts of an asset key in the same way, for the name of its op


@dataclass(frozen=True, slots=True)
class DagsterNames:
    """The names of the project whose asset keys begin with ``prefix``."""

    prefix: tuple[str, ...] = ()

    @classmethod
    def of(cls, key_prefix: str | Iterable[str]) -> "DagsterNames":
        """The names with a prefix as users write it: ``team/helper``, or a list. Raises UserError if it is not valid.

        An empty prefix gives the plain names.
        """
        parts = tuple(filter(None, key_prefix.split("/")) if isinstance(key_prefix, str) else key_prefix)
        for part in parts:
            if not _PART.fullmatch(part):
                raise UserError(
                    f"key_prefix: got {part!r}; expected letters, digits and underscores that begin with a letter, "
                    "such as helper or team/helper"
                )
        return cls(parts)

    def key(self, asset: str) -> dg.AssetKey:
        """The key of an asset."""
        return dg.AssetKey([*self.prefix, asset])

    def name(self, plain: str) -> str:
        """The name of anything but an asset: of a job, a sensor, a schedule, a pool, an op, a resource."""
        return _JOINT.join([*self.prefix, plain])

    @property
    def rounds(self) -> dg.DynamicPartitionsDefinition:
        """One partition for each round, added when the round begins: r0001, r0002, ..."""
        return dg.DynamicPartitionsDefinition(name=self.name("rft_round"))

    @property
    def imports(self) -> dg.DynamicPartitionsDefinition:
        """One partition for each import of traces, by its name."""
        return dg.DynamicPartitionsDefinition(name=self.name("rft_import"))

    def bound(self, body: Callable[..., _Result]) -> Callable[..., _Result]:
        """``body`` with its parameters of resources named after this project's resources, as Dagster looks them up."""
        signature = inspect.signature(body)
        plain = {self.name(name): name for name, one in signature.parameters.items() if _is_resource(one.annotation)}

        @wraps(body)
        def renamed(*args: object, **kwargs: object) -> _Result:
            return body(*args, **{plain.get(name, name): value for name, value in kwargs.items()})

        given = {before: after for after, before in plain.items()}
        parameters = [one.replace(name=given.get(name, name)) for name, one in signature.parameters.items()]
        renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return renamed if self.prefix else body


#: The names in the Dagster instance of a home, which has one project.
PLAIN_NAMES = DagsterNames()


def _is_resource(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, dg.ConfigurableResource)
