"""A built-in multi-turn workflow: the policy talks with a simulated user."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.fault_classification import described
from rft_platform.common.threads import call_in_thread
from rft_platform.common.user_code import accepted_arguments, check_parameters, load_object
from rft_platform.rollout.recording.model_handle import ModelHandle
from rft_platform.rollout.workflow import WorkflowOutput
from rft_platform.tasks.task import Task

Messages = list[dict[str, Any]]

USER_PROMPT = """You play a user who talks to an assistant. What you want:

{prompt}

Say one thing at a time, in the words of a user, and never answer for the assistant. When you have got what you want, \
or it is clear that you will not, write {stop_phrase}."""


@dataclass(frozen=True, slots=True)
class DialogueWorkflow:
    """Let the policy answer a simulated user until the user stops, at most ``max_rounds`` answers.

    ``user`` is an auxiliary model, or a function ``(messages, task) -> text | None`` given as
    ``package.module:function``; one that is not async runs in a thread. The function gets the conversation so far,
    without system messages; the policy is the role ``assistant``. The function may return None to stop. If it has a
    parameter ``model``, it also gets the run's model, for ``set_env_state`` and ``give_step_reward``.
    """

    user: str
    max_rounds: int = 6
    stop_phrase: str = "[DONE]"
    system_prompt: str | None = None
    user_prompt: str = USER_PROMPT  # for an auxiliary model; {prompt}, {answer} and {stop_phrase} are filled in
    opening: str = "task"  # source of the first message: "task" (its prompt, verbatim) or "user"
    _function: Callable[..., Any] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise UserError(f"workflow dialogue: max_rounds is {self.max_rounds}, expected 1 or more")
        if self.opening not in ("task", "user"):
            raise UserError(f"workflow dialogue: opening is {self.opening!r}, expected 'task' or 'user'")
        try:
            self._prompt("", "")
        except (LookupError, ValueError, AttributeError) as error:
            raise UserError(
                f"workflow dialogue: user_prompt cannot be filled in ({described(error)}): expected only {{prompt}}, "
                "{answer} and {stop_phrase} in braces; write every other brace twice"
            ) from None
        if ":" not in self.user:
            return
        function = load_object(self.user, "dialogue user")
        try:
            check_parameters(function, "Dialogue user", ("messages",), ("task", "model"))
        except (TypeError, ValueError) as error:
            raise UserError(f"workflow dialogue: user {self.user!r}: {error}") from error
        object.__setattr__(self, "_function", function)

    async def run(
        self, task: Task, model: ModelHandle, auxiliary_models: Mapping[str, Any] | None = None
    ) -> WorkflowOutput:
        """Return the conversation, a list of messages, as the response. Metrics: rounds, user_stopped (1 or 0)."""
        next_message = self._speaker(task, model, dict(auxiliary_models or {}))
        system: Messages = task.system_messages(self.system_prompt)
        conversation: Messages = []
        text: str | None = task.prompt if self.opening == "task" else await next_message(conversation)
        rounds = 0
        while text is not None:
            conversation.append({"role": "user", "content": text})
            answer = await model.chat([*system, *conversation])
            conversation.append({"role": "assistant", "content": answer.get("content") or ""})
            rounds += 1
            if rounds == self.max_rounds:
                break
            text = await next_message(conversation)
        metrics = {"rounds": float(rounds), "user_stopped": float(text is None)}
        return WorkflowOutput(response=conversation, metrics=metrics)

    def _speaker(self, task: Task, model: ModelHandle, auxiliary: dict[str, Any]) -> Callable[[Messages], Any]:
        """Return an async function that gives the user's next message in a conversation, None to stop."""
        function = self._function
        if function is None and self.user not in auxiliary:
            known = ", ".join(sorted(auxiliary)) or "none"
            raise UserError(
                f"workflow dialogue: user {self.user!r} is not an auxiliary model ({known}); name one of "
                "explorer.auxiliary_models, or a function as package.module:function"
            )

        async def answer_as_user(conversation: Messages) -> str | None:
            """Return the simulated user's next message; None ends the dialogue."""
            if function is not None:
                offered = {"messages": [dict(message) for message in conversation], "task": task.raw, "model": model}
                arguments = accepted_arguments(function, offered)
                is_async = inspect.iscoroutinefunction(function)
                text = function(**arguments) if is_async else await call_in_thread(function, arguments)
                text = await text if inspect.isawaitable(text) else text
            else:
                text = (await auxiliary[self.user].chat(self._seen_by_user(task, conversation))).get("content")
            return None if not text or self.stop_phrase in text else str(text)

        return answer_as_user

    def _prompt(self, prompt: str, answer: str) -> str:
        return self.user_prompt.format(prompt=prompt, answer=answer, stop_phrase=self.stop_phrase)

    def _seen_by_user(self, task: Task, conversation: Messages) -> Messages:
        """Return the conversation with swapped roles: the model that plays the user answers as ``assistant``."""
        prompt = self._prompt(task.prompt, task.answer or "")
        turned = {"user": "assistant", "assistant": "user"}
        begin = [{"role": "system", "content": prompt}]
        if not conversation:
            begin.append({"role": "user", "content": "Hello! How can I help you?"})
        return [*begin, *({"role": turned[message["role"]], "content": message["content"]} for message in conversation)]
