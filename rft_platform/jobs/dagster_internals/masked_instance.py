"""Dagster's instance: it masks secrets in everything it stores, and its waits for pool slots can be interrupted.

``dagster.yaml`` names this class, so every process of Dagster uses it: webserver, daemon, code servers, run workers.

Upstream: Dagster masks nothing that it stores and has no hook before an event is stored (a closed request is
https://github.com/dagster-io/dagster/issues/681). ``python_logs`` sees log lines, but not stack traces, metadata, tags
and ticks. The overridden methods are public names of ``DagsterInstance``; only the types are private.
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import dagster as dg
from dagster._core.instance.ref import InstanceRef
from dagster._core.scheduler.instigation import InstigatorTick
from dagster._serdes import deserialize_value, serialize_value

from rft_platform.common.redaction import redact, redaction
from rft_platform.config.home import PRIVATE_UMASK
from rft_platform.jobs.dagster_internals.pool_claims import make_claims_interruptible
from rft_platform.observability.masked_output import mask_output

Stored = TypeVar("Stored", bound=Any)


class MaskedInstance(dg.DagsterInstance):
    """Masks events (messages, stack traces, causes, metadata), run tags and sensor ticks before they are stored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        make_claims_interruptible(self)
        # Dagster's own programs do not run the platform's start-up code, which masks their output. Dagster captures
        # this output into files below the home.
        mask_output()
        os.umask(PRIVATE_UMASK)

    @classmethod
    def config_schema(cls) -> dict[str, Any]:
        """No settings beyond Dagster's own."""
        return {}

    @classmethod
    def config_defaults(cls, base_dir: str) -> Any:
        """Dagster's own storages and launchers below ``base_dir``."""
        return InstanceRef.config_defaults(base_dir)

    def handle_new_event(self, event: dg.EventLogEntry, **options: Any) -> None:
        """Store the event, masked, and pass it to its subscribers."""
        super().handle_new_event(without_secrets(event), **options)

    def store_event(self, event: dg.EventLogEntry) -> None:
        """Store the event, masked."""
        super().store_event(without_secrets(event))

    def add_run_tags(self, run_id: str, new_tags: Mapping[str, str]) -> None:
        """Add the tags, masked."""
        super().add_run_tags(run_id, {name: redact(value) for name, value in new_tags.items()})

    def update_tick(self, tick: InstigatorTick) -> Any:
        """Store the outcome of a sensor's or schedule's evaluation, masked."""
        return super().update_tick(tick._replace(tick_data=without_secrets(tick.tick_data)))


def without_secrets(stored: Stored) -> Stored:
    """A copy of a Dagster record with the secrets in its texts masked; the record itself if it contains none."""
    content = json.loads(serialize_value(stored))
    clean = _masked(content, redaction())
    return stored if clean == content else deserialize_value(json.dumps(clean), type(stored))


def _masked(value: Any, mask: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, list):
        return [_masked(item, mask) for item in value]
    if isinstance(value, dict):
        return {key: _masked(item, mask) for key, item in value.items()}
    return value
