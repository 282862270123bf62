"""Further trainable policies: the engines that answer their calls, and the engine status that their rows record."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rft_platform.inference.http_contract import NO_KEY
from rft_platform.inference.interface import EngineStatus, PolicyEngine


@dataclass(frozen=True, slots=True)
class PolicyRoute:
    """Route of the calls to a further policy."""

    model: str  # name of the policy at its engine
    base_url: str  # root of that engine's OpenAI API; ends in /v1
    api_key: str = field(default=NO_KEY, repr=False)  # the engine's API key


@dataclass(frozen=True, slots=True)
class FurtherPolicies:
    """The further policies of a batch of runs by name, with the status of their engines when the batch began."""

    engines: Mapping[str, PolicyEngine] = field(default_factory=dict)
    statuses: Mapping[str, EngineStatus] = field(default_factory=dict)

    @classmethod
    def of(cls, engines: Mapping[str, PolicyEngine] | None) -> "FurtherPolicies":
        """Query the status of every engine. Raises EngineError if one does not answer."""
        engines = dict(engines or {})
        return cls(engines, {name: engine.status() for name, engine in engines.items()})

    @property
    def routes(self) -> dict[str, PolicyRoute]:
        """Routes by the name that a call gives as its model."""
        return {
            name: PolicyRoute(self.statuses[name].model_path, engine.base_url, engine.api_key)
            for name, engine in self.engines.items()
        }

    def check(self) -> None:
        """Raise EngineError if an engine is gone."""
        for engine in self.engines.values():
            engine.status()
