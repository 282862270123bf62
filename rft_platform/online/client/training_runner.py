"""``TrainingRunner``: train a policy on the requests of an agent that answers its users with a production model.

The agent is a function of a model and a message. Users get the production model's answer. The runner repeats selected
requests with the served policy (shadow runs), sends their rewards, and commits at intervals. Users do not notice a
shadow run, even if it fails.
"""

import asyncio
import inspect
import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import openai

from rft_platform.common.errors import UserError
from rft_platform.online.client.openai_clients import AsyncOnlineClient, OnlineClient, take_mark
from rft_platform.online.traffic.selection import MARK_KEY, SamplingRateStrategy, Selection, SelectionStrategy

Effect = Literal["read", "idempotent", "sandboxed", "write"]
P = ParamSpec("P")
R = TypeVar("R")

_SHADOW: ContextVar[list[str] | None] = ContextVar("shadow", default=None)  # names of tools refused in the shadow run
_EFFECT = "__rft_effect__"
LOG = logging.getLogger(__name__)
_THREADS = 4


class ShadowToolError(UserError):
    """A shadow run called a tool that may change something."""

    hint = "declare the tool's effect as read, idempotent or sandboxed if a repeated call is safe"


def tool(effect: Effect) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare the effect of a tool's call; a shadow run refuses only tools with the effect ``write``."""

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        declared = _refusing(function, _SHADOW.get if effect == "write" else lambda: None)
        setattr(declared, _EFFECT, effect)
        return declared

    return declare


def for_shadow(function: Callable[P, R], refused: list[str]) -> Callable[P, R]:
    """Wrap a tool for one shadow run. If the tool may change something, calls are refused and listed in ``refused``."""
    return _refusing(function, lambda: refused) if getattr(function, _EFFECT, "write") == "write" else function


def name_of(function: Callable[..., Any]) -> str:
    """The name of a tool: of its function, also inside ``functools.partial``, or of its class if it is an object."""
    inner = _unwrapped(function)
    return getattr(inner, "__name__", None) or type(inner).__name__


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calls of a function, a partial or an object return an awaitable."""
    inner = _unwrapped(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function


def _refusing(function: Callable[P, R], find_refused: Callable[[], list[str] | None]) -> Callable[P, R]:
    """Wrap the tool: it refuses calls while ``find_refused`` returns the list of refused tools of a shadow run."""
    name = name_of(function)

    def check() -> None:
        refused = find_refused()
        if refused is not None:
            refused.append(name)
            raise ShadowToolError(f"tool {name} may change something, so a shadow run does not call it")

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        check()
        return function(*args, **kwargs)

    @wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        check()
        return await function(*args, **kwargs)  # type: ignore[misc]

    wrapper: Any = call_async if is_async(function) else call
    return wrapper


@contextmanager
def shadow() -> Iterator[list[str]]:
    """Context manager of a shadow run. Yields the list of refused tools: agents often catch errors of their tools."""
    refused: list[str] = []
    token = _SHADOW.set(refused)
    try:
        yield refused
    finally:
        _SHADOW.reset(token)


@dataclass(frozen=True, slots=True)
class AgentModel:
    """The arguments of an agent for one request: an OpenAI client, the model's name, and the tools by name.

    ``client`` is an ``openai.AsyncOpenAI`` for agents that are coroutine functions, else an ``openai.OpenAI``.
    """

    client: Any
    name: str
    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShadowRun:
    """A request that was repeated with the served policy; a reward function rates it."""

    message: Any
    response: Any  # what the agent returned with the served policy
    production_response: Any  # what the agent returned to the user
    task_id: str
    run_id: str


@dataclass(slots=True)
class RunnerCounts:
    """Counts of a runner since its start."""

    requests: int = 0
    selected: int = 0
    dropped: int = 0  # selected requests that were not repeated, because too many shadow runs waited
    rewarded: int = 0  # shadow runs whose reward was sent
    refused_tools: int = 0  # shadow runs that ended at a tool that may change something
    failed: int = 0  # shadow runs or rewards that raised another error
    committed: int = 0  # rows
    failed_commits: int = 0


RewardCalculator = Callable[[ShadowRun], float]


class TrainingRunner:
    """Repeats selected requests of agents with a served policy, and sends the rewards of these shadow runs."""

    def __init__(
        self,
        trinity_endpoint: str,
        model_name: str,
        reward_calculator: RewardCalculator,
        *,
        selection_strategy: SelectionStrategy | None = None,
        commit_interval_seconds: float = 300.0,
        repeat_time: int = 1,
        api_key: str = "EMPTY",
        most_waiting: int = 1000,
    ) -> None:
        """``trinity_endpoint``: URL of the online service. ``repeat_time``: shadow runs per request; they form a group.

        Without ``selection_strategy`` a tenth of the requests is selected. A selected request is dropped while
        ``most_waiting`` shadow runs wait.
        """
        if repeat_time < 1 or commit_interval_seconds <= 0:
            raise UserError("repeat_time: expected at least 1; commit_interval_seconds: expected more than 0")
        self.counts = RunnerCounts()
        self._model_name = model_name
        self._reward = reward_calculator
        self._selection = Selection([selection_strategy or SamplingRateStrategy.of(0.1)])
        self._interval = commit_interval_seconds
        self._repeats = repeat_time
        self._endpoint, self._api_key = trinity_endpoint, api_key
        self._most_waiting = most_waiting
        self._client = OnlineClient(trinity_endpoint, api_key, commit_at_exit=False)
        self._lock = threading.Lock()
        self._waiting: set[Future[None]] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._stopping = threading.Event()
        self._committer: threading.Thread | None = None

    def start(self) -> "TrainingRunner":
        """Begin to select requests and to commit at intervals; a runner starts only once."""
        if self._pool is not None:
            raise UserError("this runner has started already")
        if self._stopping.is_set():
            raise UserError("this runner was stopped: create another TrainingRunner, and start that one")
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shadow-run")
        self._committer = threading.Thread(target=self._commit_at_intervals, name="commits", daemon=True)
        self._committer.start()
        return self

    def stop(self, timeout_s: float = 60.0) -> None:
        """Wait up to ``timeout_s`` seconds for shadow runs, cancel shadow runs that have not begun, then commit."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        wait(tuple(self._waiting), timeout_s)
        pool.shutdown(wait=False, cancel_futures=True)
        self._stopping.set()
        assert self._committer is not None
        self._committer.join(timeout_s)
        self._commit()
        self._client.close()

    def __enter__(self) -> "TrainingRunner":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def observe(
        self,
        agent: Callable[[AgentModel, Any], Any],
        client: Any,
        model: str,
        tools: Sequence[Callable[..., Any]] = (),
    ) -> Callable[[Any], Any]:
        """Wrap the agent into a function of a message that answers with the production ``model`` of ``client``.

        The result is a coroutine function if the agent is one. The agent gets the tools in ``AgentModel.tools``, by
        their names; a shadow run may call only tools that are declared safe (``tool``). Raises UserError if two tools
        have the same name.
        """
        names = Counter(map(name_of, tools))
        if twice := [name for name, number in names.items() if number > 1]:
            raise UserError(f"tools: {', '.join(twice)} is the name of several: give each its own name")
        named = {name_of(each): each for each in tools}
        production = AgentModel(client, model, named)
        if is_async(agent):

            async def answer_async(message: Any) -> Any:
                label = take_mark()
                response = await agent(production, message)
                self._consider(agent, named, message, response, label)
                return response

            return answer_async

        def answer(message: Any) -> Any:
            label = take_mark()
            response = agent(production, message)
            self._consider(agent, named, message, response, label)
            return response

        return answer

    def _consider(
        self, agent: Callable[..., Any], tools: Mapping[str, Any], message: Any, response: Any, label: str | None
    ) -> None:
        """Queue the shadow runs of a request if it is selected. Never raises, because the user has been answered."""
        pool = self._pool
        if pool is None:
            return
        task = f"task-{uuid.uuid4()}"
        self._count("requests")
        try:
            request = {"message": message, "metadata": {MARK_KEY: label} if label else {}}
            if not self._selection.decide(request, {"response": response}, task, {}, "").accept:
                return
            self._count("selected")
            if len(self._waiting) + self._repeats > self._most_waiting:
                self._count("dropped")
                return
            for run in range(self._repeats):
                future = pool.submit(self._repeat, agent, tools, message, response, task, str(run))
                self._waiting.add(future)
                future.add_done_callback(self._waiting.discard)
        except Exception:
            self._count("failed")
            LOG.exception("a request could not be selected for training")

    def _repeat(
        self, agent: Callable[..., Any], tools: Mapping[str, Any], message: Any, answered: Any, task: str, run: str
    ) -> None:
        """Shadow run: repeat the request with the served policy, invisible to the user, and send its reward.

        The shadow run gets no reward if one of its tool calls was refused.
        """
        try:
            with shadow() as refused:
                own = {name: for_shadow(each, refused) for name, each in tools.items()}
                response = self._answer(agent, own, message, task, run)
            if refused:
                raise ShadowToolError(f"{', '.join(refused)} may change something")
            reward = float(self._reward(ShadowRun(message, response, answered, task, run)))
            self._client.feedback(reward=reward, task_id=task, run_id=run, feedback_id=f"{task}/{run}")
            self._count("rewarded")
        except ShadowToolError as error:
            self._count("refused_tools")
            LOG.info("shadow run %s/%s ended: %s", task, run, error)
        except Exception:
            self._count("failed")
            LOG.warning("shadow run %s/%s failed", task, run, exc_info=True)

    def _answer(self, agent: Callable[..., Any], tools: Mapping[str, Any], message: Any, task: str, run: str) -> Any:
        """Call the agent with the served policy."""
        if is_async(agent):
            return asyncio.run(self._answer_async(agent, tools, message, task, run))
        return agent(AgentModel(self._client.run(task, run).openai, self._model_name, tools), message)

    async def _answer_async(
        self, agent: Callable[..., Any], tools: Mapping[str, Any], message: Any, task: str, run: str
    ) -> Any:
        client = AsyncOnlineClient(self._endpoint, self._api_key, commit_at_exit=False)
        try:
            return await agent(AgentModel(client.run(task, run).openai, self._model_name, tools), message)
        finally:
            await client.close()

    def _commit_at_intervals(self) -> None:
        while not self._stopping.wait(self._interval):
            self._commit()

    def _commit(self) -> None:
        try:
            self._count("committed", self._client.commit().committed)
        except openai.OpenAIError as error:
            self._count("failed_commits")
            LOG.warning("the rows could not be committed now; the next commit includes them: %s", error)

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            setattr(self.counts, name, getattr(self.counts, name) + number)
