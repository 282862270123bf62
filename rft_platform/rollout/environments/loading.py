"""Environments by their names in a configuration."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rft_platform.common.errors import UserError
from rft_platform.common.user_code import load_object
from rft_platform.rollout.environments.gymnasium_env import GymnasiumEnvironment
from rft_platform.rollout.environments.interface import Environment
from rft_platform.rollout.environments.mcp_tools import McpEnvironment
from rft_platform.rollout.environments.openenv_client import OpenEnvEnvironment

GYMNASIUM, MCP, OPENENV = "gymnasium:", "mcp:", "openenv:"


def make_environment(name: str, args: Mapping[str, Any]) -> Environment:
    """A new episode of ``gymnasium:ID``, ``mcp:SERVER``, ``openenv:URL`` or of a class.

    A class is named ``package.module:Class`` or ``file.py:Class``. ``args`` are the keyword arguments. Raises UserError
    if the environment cannot be made of them.
    """
    if name.startswith(GYMNASIUM):
        return _made(name, GymnasiumEnvironment, (name.removeprefix(GYMNASIUM),), args)
    if name.startswith(MCP):
        return _made(name, McpEnvironment, (name.removeprefix(MCP),), args)
    if name.startswith(OPENENV):
        return _made(name, OpenEnvEnvironment, (name.removeprefix(OPENENV),), args)
    return _made(name, load_object(name, "environment"), (), args)


def _made(name: str, kind: Callable[..., Environment], given: tuple[str, ...], args: Mapping[str, Any]) -> Environment:
    missing = [part for part in ("reset", "step", "close") if not hasattr(kind, part)]
    if missing:
        raise UserError(f"environment {name!r}: has no {', '.join(missing)}; see docs/environments.md")
    try:
        inspect.signature(kind).bind(*given, **args)
    except TypeError as error:
        raise UserError(f"environment {name!r}: environment_args {sorted(args)} do not fit ({error})") from None
    return kind(*given, **args)
