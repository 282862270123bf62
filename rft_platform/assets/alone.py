"""Let only one run work on a round, and stop the engine and trainer work of an interrupted run.

Dagster locks no partitions, and its pools limit steps but not runs. Without this lock, a second exploration of a round
could change its data during training.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import dagster as dg

from rft_platform.config.home import Home
from rft_platform.errors import RftError, TransientError
from rft_platform.inference.interface import PolicyEngine
from rft_platform.locks import try_lock
from rft_platform.resources.engine import EngineResource
from rft_platform.resources.project import ProjectResource
from rft_platform.resources.trainer import TrainerResource

#: Assets that write data which other assets of the same round read.
_EXCLUSIVE = frozenset(
    {"warm_start_checkpoint", "policy_snapshot", "rollout_batches", "judged_experiences", "policy_checkpoint"}
    | {"sft_dataset", "preference_pairs", "sft_checkpoint", "dpo_checkpoint", "distilled_checkpoint"}
)
_WARM_START = "r0000"
_PATIENCE_S = 20.0  # the previous run may be about to end: its rows are complete shortly before it ends
_POLL_S = 0.2


class RoundBusyError(TransientError):
    """Another run is working on the round."""

    hint = "wait for that run, or cancel it; then launch the job again"


@dataclass(slots=True)
class _Held:
    stream: IO[str]
    run_id: str
    former: str | None = None  # the run that held the round before
    tidied: set[type] = field(default_factory=set)  # resource types in which the former run's work was stopped


_held: dict[Path, _Held] = {}  # by this process, until it ends or its next run starts


@contextmanager
def works_alone(context: dg.AssetExecutionContext, name: str, resources: Sequence[Any]) -> Iterator[None]:
    """Run an asset's body as the only run on its round; ``resources`` are the body's resources.

    Raises RoundBusyError that names the other run if there is one. The run holds the round until its process ends or
    works on another run. If the body is interrupted, its work in engine and trainer is stopped. Work that a killed
    earlier run left there is stopped too.
    """
    project = next((each for each in resources if isinstance(each, ProjectResource)), None)
    if project is None:
        yield
        return
    if name in _EXCLUSIVE:
        hold_round(Home(Path(project.home).absolute()), _round_key(context), context.run.run_id)
    left = _left_by_former(context, resources)
    if left:
        give_up_work(project, left)
    try:
        yield
    except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
        give_up_work(project, resources)
        raise


def hold_round(home: Home, key: str, run_id: str, patience_s: float = _PATIENCE_S) -> str | None:
    """Lock the round for this run; returns the id of the run that held it before, if it was a different one.

    Raises RoundBusyError if another run still holds it after ``patience_s`` seconds.
    """
    file = home.leases / "rounds" / f"{key}.lock"
    for other, held in list(_held.items()):  # a process works on one run after another
        if held.run_id != run_id:
            _held.pop(other).stream.close()
    if file in _held:
        return None
    file.parent.mkdir(parents=True, exist_ok=True)
    stream, deadline = file.open("a+", encoding="utf-8"), time.monotonic() + patience_s
    while not try_lock(stream):
        if time.monotonic() > deadline:
            told = _read(stream)
            stream.close()
            raise RoundBusyError(
                f"{key} is being worked on by run {told.get('run_id', '(starting)')} (process {told.get('process')}): "
                "wait for that run, or cancel it; then launch the job again"
            )
        time.sleep(_POLL_S)
    former = _read(stream).get("run_id")
    stream.truncate(0)
    json.dump({"run_id": run_id, "process": os.getpid()}, stream)
    stream.flush()
    former = former if former != run_id else None
    _held[file] = _Held(stream, run_id, former)
    return former


def give_up_work(project: ProjectResource, resources: Sequence[Any]) -> None:
    """Cancel the running training and requests, if the asset uses the trainer or the engine."""
    from rft_platform.inference.client import EngineClient
    from rft_platform.processes.lease import is_alive, read_lease

    leases = Home(Path(project.home).absolute()).leases
    for resource in resources:
        if isinstance(resource, TrainerResource):
            lease = read_lease(leases / "trainer.json")
            if lease is not None and is_alive(lease):
                with suppress(RftError):
                    resource.connect().cancel()
        elif isinstance(resource, EngineResource) and any(map(_lives, leases.glob("engine*.json"))):
            with suppress(RftError):
                _break_off(resource.connect())
            for further in filter(None, map(read_lease, sorted(leases.glob("policy-*.json")))):
                if is_alive(further):
                    with suppress(RftError), EngineClient(further) as engine:
                        _break_off(engine)


def _break_off(engine: PolicyEngine) -> None:
    in_a_check = engine.status().paused  # the new weights are not checked yet: `deploy` resumes the engine
    engine.pause("abort")
    if not in_a_check:
        engine.resume()


def _lives(lease_file: Path) -> bool:
    from rft_platform.processes.lease import is_alive, read_lease

    lease = read_lease(lease_file)
    return lease is not None and is_alive(lease)


def _left_by_former(context: dg.AssetExecutionContext, resources: Sequence[Any]) -> list[Any]:
    """The engine and trainer resources in which an interrupted former run may have left work; each is returned once."""
    held = next((each for file, each in _held.items() if file.stem == _round_key(context)), None)
    if held is None or held.former is None:
        return []
    heavy = [each for each in resources if isinstance(each, EngineResource | TrainerResource)]
    new = [each for each in heavy if type(each) not in held.tidied]
    held.tidied |= {type(each) for each in new}
    return new if new and _was_cut_short(context.instance, held.former) else []


def _was_cut_short(instance: dg.DagsterInstance, run_id: str) -> bool:
    run = instance.get_run_by_id(run_id)
    return run is not None and run.status is not dg.DagsterRunStatus.SUCCESS


def _round_key(context: dg.AssetExecutionContext) -> str:
    return context.partition_key if context.has_partition_key else _WARM_START


def _read(stream: IO[str]) -> dict[str, Any]:
    stream.seek(0)
    try:
        return dict(json.loads(stream.read()))
    except ValueError:
        return {}
