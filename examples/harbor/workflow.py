"""A workflow for task folders of Harbor: the model has a shell in the sandbox, and the task's tests give the reward."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from task_folder import HarborTask

from rft_platform.common.errors import UserError
from rft_platform.judging.sandbox.run_program import SHELL_LIMITS, Outcome, run_command
from rft_platform.rollout.workflow import WorkflowOutput

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command; returns what it prints.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@dataclass(frozen=True)
class HarborWorkflow:
    """Let the model work on the task that the column ``task`` names, a folder below ``root`` (relative to this file).

    ``max_turns`` answers at most; a command has ``command_s`` seconds, and the last ``shown`` characters of what it
    prints are shown.
    """

    root: str
    max_turns: int = 8
    command_s: float = 30.0
    shown: int = 2000

    def __post_init__(self) -> None:
        """Refuse a folder without tasks, before the first round."""
        if not any(self._tasks.glob("*/task.toml")):
            raise UserError(
                f"workflow_args.root {self._tasks}: expected a folder of task folders, each with a task.toml"
            )

    @property
    def _tasks(self) -> Path:
        return Path(__file__).parent / self.root

    async def run(self, task: Any, model: Any, auxiliary_models: Mapping[str, Any] | None = None) -> WorkflowOutput:
        """Return the reward that the tests wrote; metrics: their other numbers, turns and commands."""
        harbor = HarborTask.read(self._tasks / task.raw["task"])
        with tempfile.TemporaryDirectory(prefix="rft-harbor-") as name:
            box = Path(name)
            harbor.fill(box)
            messages = await self._converse(harbor, box, model)
            answer = messages[-1].get("content") or ""
            harbor.add_tests(box, answer)
            tests = await self._run("bash /tests/test.sh", harbor, box, harbor.verifier_s, harbor.verifier_variables)
            try:
                rewards = harbor.rewards(box)
            except ValueError as error:
                raise RuntimeError(f"{error}; it printed {(tests.stdout + tests.stderr)[-500:]!r}") from error
        reward = rewards.pop("reward", None)
        if reward is None:
            raise RuntimeError(
                f"{harbor.folder}: the tests wrote {sorted(rewards)}, and no number with the name reward"
            )
        counts = {role: float(sum(each["role"] == role for each in messages)) for role in ("assistant", "tool")}
        metrics = {**rewards, "turns": counts["assistant"], "commands": counts["tool"]}
        return WorkflowOutput(reward, answer, metrics)

    async def _converse(self, harbor: HarborTask, box: Path, model: Any) -> list[dict[str, Any]]:
        """The messages, until an answer without a call."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": harbor.instruction}]
        for _ in range(self.max_turns):
            answer = await model.chat(messages, tools=[TOOL])
            messages.append(answer)
            if not answer.get("tool_calls"):
                break
            for call in answer["tool_calls"]:
                result = await self._call(call["function"], harbor, box)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return messages

    async def _call(self, function: Mapping[str, str], harbor: HarborTask, box: Path) -> str:
        try:
            command = {"bash": json.loads(function["arguments"])["command"]}[function["name"]]
        except (KeyError, TypeError, ValueError) as error:
            return f"error: expected the tool bash with a command ({error!r})"
        done = await self._run(str(command), harbor, box, self.command_s, {})
        printed = (done.stdout + done.stderr).replace(str(box), "")[-self.shown :]
        ended = "stopped: it took too long" if done.timed_out else f"exit code {done.returncode}"
        return printed if done.ok else f"{printed}\n[{ended}]"

    async def _run(
        self, command: str, harbor: HarborTask, box: Path, wall_s: float, variables: Mapping[str, str]
    ) -> Outcome:
        own = {name: harbor.translate(value, box) for name, value in {**harbor.variables, **variables}.items()}
        limits = replace(SHELL_LIMITS, wall_s=wall_s, cpu_s=max(1, int(wall_s)))
        return await run_command(harbor.translate(f"cd {harbor.workdir} && {{ {command}\n}}", box), box, limits, own)
