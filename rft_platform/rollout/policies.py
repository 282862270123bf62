"""Trainable policies beside the first: which engine answers the calls that name one, and what its rows say of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rft_platform.inference.interface import EngineStatus, PolicyEngine
from rft_platform.inference.serving.api_keys import NO_KEY


@dataclass(frozen=True, slots=True)
class PolicyRoad:
    """Where the calls go that name a further policy."""

    model: str  # its name at its engine
    base_url: str  # root of that engine's OpenAI API; ends in /v1
    api_key: str = field(default=NO_KEY, repr=False)  # that it asks for


@dataclass(frozen=True, slots=True)
class FurtherPolicies:
    """The further policies of a batch of runs by name, as their engines served them when the batch began."""

    engines: Mapping[str, PolicyEngine] = field(default_factory=dict)
    statuses: Mapping[str, EngineStatus] = field(default_factory=dict)

    @classmethod
    def of(cls, engines: Mapping[str, PolicyEngine] | None) -> "FurtherPolicies":
        """Raises EngineError where an engine does not answer."""
        engines = dict(engines or {})
        return cls(engines, {name: engine.status() for name, engine in engines.items()})

    @property
    def roads(self) -> dict[str, PolicyRoad]:
        """By the name that a call gives as its model."""
        return {
            name: PolicyRoad(self.statuses[name].model_path, engine.base_url, engine.api_key)
            for name, engine in self.engines.items()
        }

    def check(self) -> None:
        """Raise EngineError where an engine is gone."""
        for engine in self.engines.values():
            engine.status()


#: A batch whose runs have the first policy alone.
NONE = FurtherPolicies()
