"""The model and the experiences of class-style workflows, with the names that Trinity-RFT gives to their members."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from rft_platform.common.errors import UserCodeError, UserError
from rft_platform.experience.record import ModelCall
from rft_platform.openai_api.messages import normalised
from rft_platform.rollout.recording.model_handle import ModelHandle

LOG = logging.getLogger(__name__)

#: Arguments of ``chat`` and ``generate`` that are no parameters of the OpenAI client: they go into the request's body.
_IN_BODY = ("top_k", "min_tokens", "repetition_penalty", "chat_template_kwargs")
#: Arguments without effect: the log-prob of every sampled token is recorded, and adapters are part of the policy.
_IGNORED = ("logprobs", "lora_request")
_SEE = "docs/workflows.md lists what classes written for Trinity-RFT can use"


@dataclass(slots=True)
class ExperienceId:
    """The ``eid`` of an experience. A class may set its numbers; the platform numbers runs and steps itself."""

    batch: int | str = 0
    task: int | str = ""
    run: int = 0
    step: int = 0


class Experience:
    """What a class-style workflow returns: one recorded model call, or all calls of a conversation.

    ``reward`` and ``step_reward`` can be set, and ``metrics`` can be changed. ``tokens``, ``logprobs`` and the other
    recorded facts are those of the (last) call, as lists. ``eid`` and ``info`` can be set and are not stored.
    """

    def __init__(self, *calls: ModelCall, **fields: Any) -> None:
        """Raises UserCodeError for tokens that no call has sampled: experiences come from the model."""
        if fields or not calls:
            raise UserCodeError(
                "Experience(...): experiences are recorded; return those of model.chat(), model.generate(), "
                "model.extract_experience_from_history() or process_messages_to_experience()"
            )
        self.calls = calls
        self.eid = ExperienceId()
        self.info: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "calls":  # not set yet, as in a copy; without this line the lookup would recurse
            raise AttributeError(name)
        return getattr(self.calls[-1], name)

    @property
    def reward(self) -> float | None:
        """Reward of the run; the last one that is set counts."""
        return self.calls[-1].reward

    @reward.setter
    def reward(self, value: float | None) -> None:
        for call in self.calls:
            call.reward = value

    @property
    def step_reward(self) -> float | None:
        """Reward of the last call alone."""
        return self.calls[-1].step_reward

    @step_reward.setter
    def step_reward(self, value: float | None) -> None:
        self.calls[-1].step_reward = value

    @property
    def env_state_hash(self) -> str | None:
        """Digest of the environment's state at the last call; ``model.set_env_state`` computes it."""
        return self.calls[-1].env_state_hash

    @env_state_hash.setter
    def env_state_hash(self, value: str | None) -> None:
        self.calls[-1].env_state_hash = value

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics, stored with the last call."""
        return self.calls[-1].metrics

    @metrics.setter
    def metrics(self, value: dict[str, float] | None) -> None:
        self.calls[-1].metrics = value or {}

    @property
    def tokens(self) -> list[int]:
        """Token ids of prompt and response."""
        return [*self.calls[-1].prompt_ids, *self.calls[-1].response_ids]

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.calls[-1].prompt_ids)

    @property
    def logprobs(self) -> list[float]:
        """Log-probs of the response's tokens, as the engine sampled them."""
        return self.calls[-1].rollout_logprobs

    @property
    def truncate_status(self) -> str | None:
        """``response_truncated`` if the limit of tokens ended the response."""
        return "response_truncated" if self.calls[-1].finish_reason == "length" else None


class ModelWrapper:
    """The ``model`` of a class-style workflow: a model handle whose calls return experiences.

    All other members are those of the handle: a run's ``ModelHandle``, or an ``AuxiliaryModel``, whose answers are no
    experiences to train on.
    """

    enable_history = True  # every call of the policy is recorded

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._policies: dict[str, ModelWrapper] = {}
        self._clients: dict[type, tuple[Any, Any]] = {}  # of each kind: the handle's client, and the copy of it
        self._used: set[tuple[int, int]] = set()  # order and choice of the calls of earlier conversations

    def __getattr__(self, name: str) -> Any:
        if name != "_handle" and hasattr(self._handle, name):
            return getattr(self._handle, name)
        raise AttributeError(f"model.{name} does not exist here; {_SEE}")

    @property
    def model_path(self) -> str:
        """Name of the model in a request."""
        return str(self._handle.model_name)

    def policy(self, name: str) -> "ModelWrapper":
        """Return the model of another trainable policy of the run."""
        if name not in self._policies:
            self._policies[name] = policy = ModelWrapper(self._handle.policy(name))
            policy._used = self._used
        return self._policies[name]

    def get_openai_client(self) -> Any:
        """Return the run's ``openai.OpenAI``; its ``model_path`` is the model's name in a request."""
        return self._with_path(self._handle.get_openai_client())

    def get_openai_async_client(self) -> Any:
        """Return the run's ``openai.AsyncOpenAI``; its ``model_path`` is the model's name in a request."""
        return self._with_path(self._handle.get_openai_async_client())

    def chat(self, messages: list[dict[str, Any]], **arguments: Any) -> list[Experience]:
        """Return ``n`` answers to a conversation. It blocks: use it in ``run``."""
        request = self.get_openai_client().chat.completions.create
        return self._experiences(request(model=self.model_path, messages=messages, **_arguments(arguments)))

    async def chat_async(self, messages: list[dict[str, Any]], **arguments: Any) -> list[Experience]:
        """Return ``n`` answers to a conversation."""
        request = self.get_openai_async_client().chat.completions.create
        return self._experiences(await request(model=self.model_path, messages=messages, **_arguments(arguments)))

    def generate(self, prompts: Sequence[str], **arguments: Any) -> list[Experience]:
        """Return ``n`` continuations of each text, to which no chat template is applied. It blocks."""
        request = self.get_openai_client().completions.create
        return self._experiences(request(model=self.model_path, prompt=_texts(prompts), **_arguments(arguments)))

    async def generate_async(self, prompts: Sequence[str], **arguments: Any) -> list[Experience]:
        """Return ``n`` continuations of each text, to which no chat template is applied."""
        request = self.get_openai_async_client().completions.create
        return self._experiences(await request(model=self.model_path, prompt=_texts(prompts), **_arguments(arguments)))

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Experience]:
        """Return the calls recorded since the last clearing extraction."""
        return [Experience(call) for call in self._handle.extract_experience_from_history(clear_history)]

    def convert_messages_to_experience(
        self, messages: list[dict[str, Any]], tools: Any = None, temperature: Any = None
    ) -> Experience:
        """Return the calls of this run that sampled the assistant messages, as one experience.

        Only sampled tokens are trained: other assistant messages are context. ``tools`` and ``temperature`` have no
        effect, because they are recorded. Raises UserCodeError if no message was sampled.
        """
        found = matched_calls(messages, self._recorded(), self._used)
        self._used |= {(call.order, call.choice) for call in found}
        if not found:
            raise UserCodeError(
                "the conversation has no assistant message that this run's model sampled: append the answers of "
                "model.chat() to the messages as they are"
            )
        return Experience(*found)

    async def convert_messages_to_experience_async(
        self, messages: list[dict[str, Any]], tools: Any = None, temperature: Any = None
    ) -> Experience:
        """Return the same as ``convert_messages_to_experience``."""
        return self.convert_messages_to_experience(messages, tools, temperature)

    def logprobs(self, *_positional: Any, **_arguments: Any) -> NoReturn:
        """Raises UserCodeError: text that the model did not sample is scored by the trainer."""
        raise UserCodeError(
            "model.logprobs: experience.logprobs are those of sampled tokens; the trainer computes those of a teacher "
            "(algorithm_type: on_policy_distill) or of a reference (algorithm.kl_loss_fn)"
        )

    logprobs_async = logprobs

    def _with_path(self, client: Any) -> Any:
        """A copy of a client with ``model_path``: all policies of a run share the client and its connections."""
        known = self._clients.get(type(client))
        if known is None or known[0] is not client:
            copied = client.with_options()
            copied.model_path = self.model_path
            self._clients[type(client)] = known = client, copied
        return known[1]

    def _recorded(self) -> Iterable[ModelCall]:
        return self._handle.recorded_calls() if isinstance(self._handle, ModelHandle) else ()

    def _experiences(self, answer: Any) -> list[Experience]:
        """The choices of an answer: the recorded calls, or for an auxiliary model its texts."""
        found = [Experience(call) for call in self._recorded() if call.msg_id == answer.id]
        return found or [Experience(_unrecorded(answer.id, choice)) for choice in answer.choices]


@dataclass(slots=True)
class RolloutArgs:
    """``task.rollout_args``: the taskset's sampling parameters, as arguments of ``model.chat``."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    stop: list[str] | None = field(default=None)


def rollout_args_of(model: ModelHandle) -> RolloutArgs:
    """The sampling parameters of a run."""
    sampling = model.sampling
    stop = list(sampling.stop) or None
    return RolloutArgs(1, sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, stop)


def calls_of(returned: Any) -> Any:
    """Replace the experiences that a class returned, or the only one, by their model calls; nothing else changes."""
    if isinstance(returned, Experience):
        return list(returned.calls)
    if isinstance(returned, list) and all(isinstance(item, Experience) for item in returned):
        return [call for experience in returned for call in experience.calls]
    return returned


def matched_calls(
    messages: Sequence[Mapping[str, Any]], recorded: Iterable[ModelCall], used: Collection[tuple[int, int]]
) -> list[ModelCall]:
    """Return the calls that sampled the assistant messages of a conversation, each at most once.

    A call fits a message with its text and tool calls that follows the messages of its request; of several such calls
    one that is not ``used`` is taken. A message that no call fits gets one with the same text.
    """
    compared = [_compared(message) for message in messages]
    rest, found, inexact = list(recorded), list[ModelCall](), 0
    for place, message in enumerate(compared):
        if message.role != "assistant":
            continue
        fits = [fit for call in rest if (fit := _fit(call, message, compared[:place], used)) is not None]
        if not fits:
            continue
        best = max(fits, key=lambda fit: (fit.exact, fit.unused))
        inexact += not best.exact
        rest = [call for call in rest if call is not best.call]
        found.append(best.call)
    if inexact:
        LOG.warning(
            "%d assistant messages follow other messages than those of the recorded calls and were matched by their "
            "text: append the answers of model.chat() to the messages, and do not change earlier messages",
            inexact,
        )
    return found


class _Compared(NamedTuple):
    """What messages are compared by."""

    role: Any
    text: Any
    called: list[tuple[Any, Any]]  # name and arguments of each tool call


class _Fit(NamedTuple):
    """A call that may have sampled a message."""

    call: ModelCall
    exact: bool
    unused: bool


def _fit(
    call: ModelCall, message: _Compared, before: list[_Compared], used: Collection[tuple[int, int]]
) -> _Fit | None:
    answer = _compared({**call.response, "role": "assistant"})
    if answer.text != message.text or (message.called and answer.called != message.called):
        return None
    exact = answer.called == message.called and [_compared(each) for each in call.messages] == before
    return _Fit(call, exact, (call.order, call.choice) not in used)


def _compared(message: Mapping[str, Any]) -> _Compared:
    try:
        plain = normalised(dict(message))
    except UserError:  # images, for example
        plain = dict(message)
    functions = [call.get("function") or {} for call in plain.get("tool_calls") or [] if isinstance(call, dict)]
    called = [(function.get("name"), function.get("arguments")) for function in functions]
    return _Compared(plain.get("role"), plain.get("content"), called)


def _texts(prompts: Sequence[str]) -> list[str]:
    if isinstance(prompts, str):
        raise UserCodeError("model.generate was given text, expected a list of prompts: model.generate([prompt])")
    return list(prompts)


def _arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in arguments.items() if name not in _IGNORED and value is not None}
    body = {name: given.pop(name) for name in _IN_BODY if name in given}
    if body:
        given["extra_body"] = {**body, **given.get("extra_body", {})}
    return given


def _unrecorded(msg_id: str, choice: Any) -> ModelCall:
    text = choice.message.content if hasattr(choice, "message") else choice.text
    message = {"role": "assistant", "content": text}
    return ModelCall(msg_id, [], [], [], choice.finish_reason, 1.0, 1.0, -1, [], [], message)
