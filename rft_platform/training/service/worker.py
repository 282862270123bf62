"""The process of one rank of the trainer group: ``python -m rft_platform.training.service.worker OPTIONS``.

The options are those of ``training.launch.trainer_service``, as JSON. Rank 0 receives commands over HTTP and broadcasts
them to the other ranks. The lease states its address: loopback or, on a Ray cluster, the address of its node.
"""

import importlib
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict

import psutil

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are local folders: never ask the hub

import torch
from transformers.utils import logging as transformers_logging

from rft_platform.cluster.local.processes import is_stopped
from rft_platform.cluster.local.service_process import EXIT_USER_ERROR, ServiceProcess, end_with_starter
from rft_platform.cluster.this_process import NOT_FOR_TRANSFORMERS, importing, keep_imports
from rft_platform.common.errors import RftError, TrainerError, TrainerMemoryError
from rft_platform.common.fault_classification import is_out_of_memory
from rft_platform.common.redaction import hide
from rft_platform.observability.log_context import log_context
from rft_platform.observability.logs import configure
from rft_platform.training.distributed import Ranks
from rft_platform.training.loop.session import TrainingSession
from rft_platform.training.loop.step_metrics import peak_rss_mb
from rft_platform.training.protocol import Layout, Message, StepEvent, error_message, train_request
from rft_platform.training.service.command_server import CommandServer, Job

LOG = logging.getLogger("rft_platform.training.service.worker")
_DTYPES, _DEVICES = ("auto", "float32", "bfloat16"), ("auto", "cpu", "cuda")


def main() -> None:
    """Serve commands until a shutdown command or the idle time-out."""
    options = json.loads(sys.argv[1])
    configure("trainer")
    end_with_starter()
    for name, known in (("dtype", _DTYPES), ("device", _DEVICES)):
        if options[name] not in known:
            print(f"error: {name} {options[name]!r}: expected one of {', '.join(known)}", file=sys.stderr, flush=True)
            sys.exit(EXIT_USER_ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(options["threads"])
    ranks = Ranks.join(options["device"], Layout(**options["layout"]))
    session = TrainingSession(ranks, options["dtype"])
    if ranks.is_first:
        try:
            _lead(session, ServiceProcess.from_environment("trainer"))
        except RftError as error:  # for example a full disk: the end of the log is shown to who started the group
            sys.exit(f"error: {error}")
    else:
        _follow(session)
    session.close()
    ranks.leave()


def _lead(session: TrainingSession, service: ServiceProcess) -> None:
    """Rank 0: publish the lease, receive commands, broadcast them to the other ranks."""
    family = _family()
    hide(service.token)
    server = CommandServer(service, lambda: _status(session, family), lambda: not is_stopped(family[0]))
    service.publish(server.port, launcher=_launcher())
    LOG.info("ready: %d ranks on %s", session.ranks.world_size, session.ranks.device.type)
    try:
        _preload()
        while (job := server.next_job()) is not None and _serve(session, server, job):
            pass
    finally:
        service.withdraw()
        server.close()
    session.ranks.broadcast({"command": "shutdown"})


def _preload() -> None:
    """Import what the first command needs, while the caller prepares it."""
    with importing(without=NOT_FOR_TRANSFORMERS):
        for module in ("pyarrow.parquet", "pyarrow.compute", "transformers.models.auto.modeling_auto"):
            importlib.import_module(module)
        keep_imports()


def _serve(session: TrainingSession, server: CommandServer, job: Job) -> bool:
    """Run one job. Return False if it was a shutdown. An error that is not an RftError ends the process."""
    if job.command["command"] == "shutdown":
        server.finish(job, {"event": "done"})
        return False
    with log_context(job.context):
        _work(session, server, job)
    return True


def _work(session: TrainingSession, server: CommandServer, job: Job) -> None:
    command = job.command
    session.ranks.broadcast(command)
    try:
        server.finish(job, _execute(session, command, job.send, server.cancelled.is_set))
    except RftError as error:
        LOG.warning("%s failed: %s", command["command"], error)
        server.finish(job, error_message(error))
    except Exception as error:
        kind = TrainerMemoryError if is_out_of_memory(error) else TrainerError
        ending = kind(f"{type(error).__name__}: {error}; the trainer ends, its log has more")
        server.finish(job, error_message(ending))
        raise


def _follow(session: TrainingSession) -> None:
    """Ranks other than 0: run the commands that rank 0 broadcasts."""
    _preload()
    while (command := session.ranks.broadcast(None))["command"] != "shutdown":
        try:
            _execute(session, command, lambda message: None, lambda: False)
        except RftError as error:
            LOG.warning("%s failed: %s", command["command"], error)


def _execute(
    session: TrainingSession, command: Message, send: Callable[[Message], None], cancelled: Callable[[], bool]
) -> Message:
    """Run a command on this rank; return its last event."""

    def on_step(event: StepEvent) -> None:
        send({"event": "step", **asdict(event)})

    def on_repeat(steps: int, trainings: int) -> None:
        send({"event": "repeat", "steps": steps, "trainings": trainings})

    try:
        if command["command"] == "score":
            return {"event": "done", "logprobs": session.score(command["sequences"])}
        result = session.train(train_request(command["request"]), on_step, cancelled, on_repeat)
        LOG.info("trained %d steps: policy version %d, %s", result.steps, result.policy_version, result.checkpoint)
        return {"event": "done", "result": asdict(result)}
    finally:
        if session.ranks.layout.frees_gpu:
            torch.cuda.empty_cache()  # does nothing without CUDA


def _family() -> list[psutil.Process]:
    """Processes of the group on this host: the ranks, and torchrun if it started them."""
    launcher = psutil.Process(pid) if (pid := _launcher()) else None
    return [psutil.Process()] if launcher is None else [launcher, *launcher.children()]


def _launcher() -> int | None:
    """Process id of torchrun, if it started this process."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def _status(session: TrainingSession, family: list[psutil.Process]) -> Message:
    state, cpu = session.state, 0.0
    for process in family:
        used = process.cpu_times()
        cpu += used.user + used.system
    return {
        "pid": os.getpid(),
        "device": str(session.ranks.device),
        "world_size": session.ranks.world_size,
        "dtype": str(session.dtype).removeprefix("torch."),
        "checkpoint": None if state is None else str(state.folder),
        "policy_version": None if state is None else state.policy_version,
        "weights_digest": None if state is None else state.weights_digest,
        "cpu_seconds": cpu,
        "peak_rss_mb": peak_rss_mb(),
    }


if __name__ == "__main__":
    main()
