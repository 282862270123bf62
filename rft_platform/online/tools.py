"""Tool safety: a shadow run (a repeated production request) may call only tools whose declared effect allows it.

    @tool(effect="read")
    def search(query: str) -> list[str]: ...

A tool that changes something would change it again in every shadow run: a second order, payment or message. Therefore a
tool without a declared effect counts as ``write``. A shadow run gets wrapped tools (``for_shadow``), which refuse calls
in every thread. An agent may also call a tool function directly instead of the wrapped one. A function declared as
``write`` then refuses the call too, but only in the thread of the shadow run and in asyncio tasks of that thread.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar

from rft_platform.common.errors import UserError

Effect = Literal["read", "idempotent", "sandboxed", "write"]
P = ParamSpec("P")
R = TypeVar("R")

_SHADOW: ContextVar[list[str] | None] = ContextVar("shadow", default=None)  # names of tools refused in the shadow run
_EFFECT = "__rft_effect__"


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
    """The block of a shadow run. Yields the list of refused tools, because agents often catch errors of their tools."""
    refused: list[str] = []
    token = _SHADOW.set(refused)
    try:
        yield refused
    finally:
        _SHADOW.reset(token)
