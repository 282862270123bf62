"""Call judges that are the user's functions in workers on a cluster of several machines.

Each call judges one run, or one group, with one part of a judge. A worker that is lost during a call is replaced, and
the call is repeated: it has stored nothing. ``judge_worker`` is what runs in the workers.
"""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from rft_platform.cluster.child import AnswerTimeoutError, ChildError
from rft_platform.cluster.interface import Bundle, Cluster
from rft_platform.cluster.worker_pool import WorkerKind, WorkerPool
from rft_platform.common.errors import JudgeUnavailableError, UserError
from rft_platform.common.user_code import user_folders
from rft_platform.judging.execution.compose import JudgePart, JudgeSpec
from rft_platform.judging.execution.judge_executor import RunToJudge, Verdict
from rft_platform.judging.judged_run import JudgedRun, run_to_json
from rft_platform.rollout.workers.worker_wire import json_text
from rft_platform.rounds.project.project import Project

LOG_NAME = "judge-workers.log"
_MODULE = "rft_platform.rounds.setup.judge_worker"
_CALLS = 3  # of one run or group, if its worker is lost each time
_MORE_S = 30.0  # a worker enforces the judge's time-out itself; later than this, it hangs
_log = logging.getLogger("rft_platform.judging")


@dataclass(frozen=True, slots=True)
class ClusterJudgeWorkers:
    """Workers on a cluster for the user's functions of a judge, which are started when they are needed."""

    cluster: Cluster
    count: int | None = None  # maximum number of workers; None: the number of concurrent calls
    bundle: Bundle = field(default_factory=Bundle)  # what each of them reserves
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    environment_s: float = 0.0  # the longest time that a node may need to build the runtime environment
    log_folder: Path | None = None

    @asynccontextmanager
    async def calling(
        self, judge: JudgeSpec, auxiliary_models: Mapping[str, Any], concurrency: int
    ) -> AsyncIterator["_Calls"]:
        """What calls the parts of ``judge``. Raises UserError for arguments that are not JSON values."""
        parts = [part for part in judge.parts if part.reference is not None]
        asking = any("auxiliary_models" in signature(part.function).parameters for part in parts)
        models = auxiliary_models if asking else {}
        setup = {
            "parts": [
                {name: getattr(part, name) for name in ("name", "reference", "args", "weight", "version")}
                for part in parts
            ],
            "timeout_s": judge.timeout_s,
            "sys_path": user_folders(),
            "auxiliary_models": {name: asdict(model.spec) for name, model in models.items()},
        }
        kind = WorkerKind(
            judge.name,
            _MODULE,
            json_text(setup, f"the arguments of judge {judge.name!r}"),
            partial(self.cluster.worker, bundle=self.bundle, runtime_env=self.runtime_env),
            LOG_NAME,
            log_folder=self.log_folder,
            environment_s=self.environment_s,
        )
        async with WorkerPool(kind, min(self.count or concurrency, concurrency)) as pool:
            yield _Calls(pool, judge.timeout_s)


def judge_workers_of(project: Project) -> ClusterJudgeWorkers | None:
    """The workers for the user's judges of a project; None if they run in this process."""
    workers = project.config.explorer.workers
    if project.config.cluster.kind == "local" or workers.kind == "inprocess" or not workers.judges:
        return None
    return ClusterJudgeWorkers(
        project.cluster,
        workers.count,
        Bundle(workers.cpus, resources=workers.resources),
        workers.runtime_env.fields,
        float(workers.runtime_env.config.setup_timeout_seconds),
        project.home.logs,
    )


class _Calls:
    """Calls the parts of one judge."""

    def __init__(self, pool: WorkerPool, timeout_s: float | None) -> None:
        self._pool, self._timeout_s = pool, timeout_s

    async def judge(self, part: JudgePart, runs: Sequence[RunToJudge]) -> list[Verdict]:
        """The verdicts of one part on a run, or on the runs of a group.

        Raises UserError and JudgeUnavailableError as the judge does in this process.
        """
        takes = signature(part.function).parameters.keys()
        entries = [_entry(run, in_full=not takes.isdisjoint(("run", "runs"))) for run in runs]
        request = json_text({"part": part.name, "runs": entries}, f"task {runs[0].run.task_id}")
        how = ""
        for _ in range(_CALLS):
            try:
                answer = await self._ask(request)
            except AnswerTimeoutError:
                error = f"TimeoutError: the judge took longer than {self._timeout_s:g} s (judge_timeout_s)"
                return [Verdict(error=error) for _ in runs]
            except ChildError as lost:
                how = lost.how
                _log.warning("a judge's worker process %s while it judged run %s", how, runs[0].run.run_id)
                continue
            if "refused" in answer:
                raise UserError(answer["refused"])
            if "unavailable" in answer:
                raise JudgeUnavailableError(answer["unavailable"])
            return [Verdict(**verdict) for verdict in answer["verdicts"]]
        return [Verdict(error=f"WorkerDied: the judge's worker process {how}, {_CALLS} times in a row") for _ in runs]

    async def _ask(self, request: bytes) -> dict[str, Any]:
        limit_s = None if self._timeout_s is None else self._timeout_s + _MORE_S
        async with self._pool.lent() as lent:
            answer: dict[str, Any] = await lent.worker.ask_async("judge", request, wall_s=limit_s)
            lent.reusable = not answer.get("late")
            return answer


def _entry(run: RunToJudge, in_full: bool) -> dict[str, Any]:
    """A run for a worker; without its conversation if the judge does not read it."""
    seen = run.run if in_full else JudgedRun(run.run.run_id, run.run.task_id, (), (), (), ())
    response = {"response": run.response} if run.document is None else {"document": run.document}
    return {"group_id": run.group_id, "task": run.task, "run": run_to_json(seen), **response}
