"""The process of a judge's worker: loads the user's functions once (``set_up``), then judges runs for the parent."""

import asyncio
import logging
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from rft_platform.common.errors import JudgeUnavailableError, RftError, UserError
from rft_platform.common.fault_classification import described
from rft_platform.common.threads import UserCodeLoop
from rft_platform.common.user_code import drop_safe_path
from rft_platform.experience.responses import ResponseDecoder
from rft_platform.judging.execution.compose import JudgePart, JudgeSpec, loaded_part
from rft_platform.judging.execution.judge_executor import JudgePass, RunToJudge, Verdict
from rft_platform.judging.judge_context import JudgeContext, JudgeState
from rft_platform.judging.judged_run import run_from_json
from rft_platform.judging.types import declared_responses
from rft_platform.observability.masked_output import mask_output
from rft_platform.rollout.workflows.auxiliary import AuxiliaryModel, AuxiliarySpec
from rft_platform.rollout.workflows.chat_models import framework_models

_worker: "JudgeWorker"


def set_up(setup: Mapping[str, Any]) -> str | None:
    """Load the functions; return None, or why they cannot be loaded."""
    global _worker
    mask_output()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    try:
        _worker = JudgeWorker(setup)
    except BaseException as error:  # user code is imported here
        traceback.print_exc()
        return str(error) if isinstance(error, RftError) else described(error)
    return None


def judge(request: Mapping[str, Any]) -> dict[str, Any]:
    """Judge a run, or the runs of a group, with one part: ``verdicts``, or the error that concerns all runs.

    ``late``: the call reached the time limit, so a thread may still run here; the parent replaces this process.
    """
    return _worker.judge(request)


class JudgeWorker:
    """Holds the user's functions across calls."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Raises UserError if a function cannot be loaded, or is not the one that the parent has loaded."""
        drop_safe_path()
        sys.path += [folder for folder in setup["sys_path"] if folder not in sys.path]
        self._parts = {entry["name"]: _loaded(entry) for entry in setup["parts"]}
        self._timeout_s = setup["timeout_s"]
        models = {
            name: AuxiliaryModel(AuxiliarySpec.from_json(spec)) for name, spec in setup["auxiliary_models"].items()
        }
        self._models = framework_models(models)
        self._judging = JudgePass(JudgeSpec(tuple(self._parts.values()), "", self._timeout_s), self._models)
        self._classes = [kind for part in self._parts.values() for kind in declared_responses(part.function)]
        # one loop for all calls: clients that libraries cache are bound to a loop
        self._loop = asyncio.Runner(loop_factory=UserCodeLoop)

    def judge(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """See ``judge`` above."""
        decoder, began = ResponseDecoder(self._classes), perf_counter()
        runs = [_run(entry, decoder) for entry in request["runs"]]
        try:
            verdicts = self._loop.run(self._judge(self._parts[request["part"]], runs))
        except JudgeUnavailableError as error:
            return {"unavailable": str(error)}
        except UserError as error:
            return {"refused": str(error)}
        late = self._timeout_s is not None and perf_counter() - began >= self._timeout_s
        return {"verdicts": [asdict(verdict) for verdict in verdicts], "late": late}

    async def _judge(self, part: JudgePart, runs: list[RunToJudge]) -> list[Verdict]:
        context = JudgeContext(JudgeState(Path()), self._models)  # for built-in judges, which do not run here
        return await self._judging.part(part, runs, context)


def _loaded(entry: Mapping[str, Any]) -> JudgePart:
    part = loaded_part(entry["name"], entry["reference"], entry["args"], entry["weight"])
    if part.version != entry["version"]:
        raise UserError(
            f"judge {entry['reference']!r}: this node loads other code or values than the host of the run, so its "
            "rewards could differ: make them the same, or set explorer.workers.judges to false"
        )
    return part


def _run(entry: Mapping[str, Any], decoder: ResponseDecoder) -> RunToJudge:
    response = decoder.decode(entry["document"]) if "document" in entry else entry["response"]
    return RunToJudge(entry["group_id"], entry["task"], response, run_from_json(entry["run"]), entry.get("document"))
