"""Let only one run work on a round, and stop the engine and trainer work of an interrupted run.

Dagster locks no partitions, and its pools limit steps but not runs. Without this lock, a second exploration of a round
could change its data during training.
"""

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import dagster as dg

from rft_platform.cluster.local.locks import try_lock
from rft_platform.common.errors import RftError, TransientError, UserError
from rft_platform.config.home import Home
from rft_platform.inference.interface import PolicyEngine
from rft_platform.resources.project import EngineResource, ProjectResource, TrainerResource

#: Assets that write data which other assets of the same round read.
_EXCLUSIVE = frozenset(
    {"warm_start_checkpoint", "policy_snapshot", "rollout_batches", "judged_experiences", "policy_checkpoint"}
    | {"sft_dataset", "preference_pairs", "sft_checkpoint", "dpo_checkpoint", "distilled_checkpoint"}
)
_WARM_START = "r0000"
_WAIT_S = 20.0  # the previous run may be about to end: its rows are complete shortly before
_POLL_S = 0.2


class RoundBusyError(TransientError):
    """Another run is working on the round."""

    hint = "wait for that run, or cancel it; then launch the job again"


@dataclass(slots=True)
class _RoundLock:
    """The lock of a round that a run of this process holds."""

    stream: IO[str]
    run_id: str
    thread: int
    previous_run: str | None = None  # the run that held the round before, if it is a different run
    cleaned: set[type] = field(default_factory=set)  # resource types in which the previous run's work was stopped


#: Locks that this process holds, each until its run ends or the thread starts another run.
_round_locks: dict[Path, _RoundLock] = {}
#: Project and resources of the asset body that each thread runs.
_bodies: dict[threading.Thread, tuple[ProjectResource, Sequence[Any]]] = {}


@contextmanager
def exclusive_round(context: dg.AssetExecutionContext, name: str, resources: Sequence[Any]) -> Iterator[None]:
    """Run an asset's body as the only run on its round; ``resources`` are the body's resources.

    Raises RoundBusyError, which names the other run, if another run holds the round, and UserError if a run of the same
    job and configuration has done the work while this one waited in the queue. The run holds the round until the run
    ends. If the body is interrupted, its work in engine and trainer is stopped. Work of an earlier run that was killed
    is stopped, too.
    """
    project = ProjectResource.among(resources)
    if project is None:
        yield
        return
    if name in _EXCLUSIVE:
        key = _round_key(context)
        _refuse_twin(context, key, hold_round(project.place, key, context.run.run_id))
    leftover = _resources_to_clean(context, resources)
    if leftover:
        cancel_work(project, leftover)
    thread = threading.current_thread()
    _bodies[thread] = (project, resources)
    try:
        yield
    except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
        cancel_work(project, resources)
        raise
    finally:
        del _bodies[thread]


def _refuse_twin(context: dg.AssetExecutionContext, key: str, previous_run: str | None) -> None:
    """Raise UserError if the job was launched twice at once, and the run before this one has done its work.

    Equal work has an equal run configuration: a judge pass with another judge is other work.
    """
    if previous_run is None:
        return
    own = context.instance.get_run_record_by_id(context.run.run_id)
    other = context.instance.get_run_record_by_id(previous_run)
    if own is None or other is None or other.end_time is None or other.end_time < own.create_timestamp.timestamp():
        return
    before, now = other.dagster_run, context.run
    if before.is_success and (before.job_name, before.run_config) == (now.job_name, now.run_config):
        raise UserError(
            f"{key}: run {previous_run} of the same job did this while this run waited: nothing was changed; launch "
            "the job again to repeat its work"
        )


def hold_round(home: Home, key: str, run_id: str, wait_s: float = _WAIT_S) -> str | None:
    """Lock the round for this run; return the id of the previous holder of the lock if that was a different run.

    Raises RoundBusyError if another run still holds the lock after ``wait_s`` seconds.
    """
    file = home.leases / "rounds" / f"{key}.lock"
    thread = threading.get_ident()
    for other, held in list(_round_locks.items()):  # a thread works on one run after another
        if held.run_id != run_id and held.thread == thread:
            _round_locks.pop(other).stream.close()
    own = _round_locks.get(file)
    if own is not None and own.run_id == run_id:
        return None
    file.parent.mkdir(parents=True, exist_ok=True)
    stream, deadline = file.open("a+", encoding="utf-8"), time.monotonic() + wait_s
    while not try_lock(stream):
        if time.monotonic() > deadline:
            holder = _read(stream)
            stream.close()
            raise RoundBusyError(
                f"{key} is in use by run {holder.get('run_id', '(starting)')} "
                f"(process {holder.get('process')}): "
                "wait for that run, or cancel it; then launch the job again"
            )
        time.sleep(_POLL_S)
    previous_run = _read(stream).get("run_id")
    stream.truncate(0)
    json.dump({"run_id": run_id, "process": os.getpid()}, stream)
    stream.flush()
    previous_run = previous_run if previous_run != run_id else None
    _round_locks[file] = _RoundLock(stream, run_id, thread, previous_run)
    return previous_run


def release_rounds(run_id: str) -> None:
    """Unlock the rounds that a run of this process holds, because it has ended."""
    for file, held in list(_round_locks.items()):
        if held.run_id == run_id:
            _round_locks.pop(file).stream.close()


def cancel_work_of(thread: threading.Thread) -> None:
    """Cancel the work in engine and trainer that the asset body of another thread has started.

    Nothing is cancelled if that thread runs no body or waits for a pool slot: then another run may use engine and
    trainer.
    """
    if (body := _bodies.get(thread)) is not None:
        cancel_work(*body)


def cancel_work(project: ProjectResource, resources: Sequence[Any]) -> None:
    """Cancel the running training and requests, if the asset uses the trainer or the engine.

    The training comes first, because a step may use the GPU of an engine that sleeps.
    """
    from rft_platform.inference.client import EngineClient

    cluster = project.place.cluster
    for resource in sorted(resources, key=lambda each: not isinstance(each, TrainerResource)):
        if isinstance(resource, TrainerResource):
            if cluster.running("trainer"):
                with suppress(RftError):
                    resource.connect(project.open()).cancel()
        elif isinstance(resource, EngineResource) and (cluster.running("engine*") or project.open().config.engine.urls):
            with suppress(RftError):
                _abort_requests(resource.connect(project.open()))
            for further in cluster.running("policy-*"):
                with suppress(RftError), EngineClient(further, cluster) as engine:
                    _abort_requests(engine)


def _abort_requests(engine: PolicyEngine) -> None:
    in_canary_check = engine.status().paused  # the new weights are not checked yet: `deploy` resumes the engine
    engine.pause("abort")
    if not in_canary_check:
        engine.resume()


def _resources_to_clean(context: dg.AssetExecutionContext, resources: Sequence[Any]) -> list[Any]:
    """The engine and trainer resources in which an interrupted previous run may have left work, each once."""
    held = next((each for file, each in list(_round_locks.items()) if file.stem == _round_key(context)), None)
    if held is None or held.previous_run is None:
        return []
    heavy = [each for each in resources if isinstance(each, EngineResource | TrainerResource)]
    new = [each for each in heavy if type(each) not in held.cleaned]
    held.cleaned |= {type(each) for each in new}
    return new if new and _was_interrupted(context.instance, held.previous_run) else []


def _was_interrupted(instance: dg.DagsterInstance, run_id: str) -> bool:
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
