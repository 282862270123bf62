"""Join a Ray cluster as a driver, once per process; its nodes and what they hold."""

import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from rft_platform.cluster.interface import Node
from rft_platform.common.errors import RftError, UserError

#: Variables of Ray: without a token, everybody who reaches a node's ports can run programs on it.
AUTH_VARIABLE, TOKEN_MODE = "RAY_AUTH_MODE", "token"
_NODE_RESOURCES = ("node:", "accelerator_type:")  # prefixes of resources that Ray gives every node
_joining = threading.Lock()
_joined: tuple[str, str] | None = None  # address and namespace


class ClusterError(RftError):
    """The Ray cluster cannot be reached, or it lost a process while it was called."""


def check_installed() -> None:
    """Raise UserError if Ray is not installed, or tokens are not required of Ray's clients."""
    if find_spec("ray") is None:
        raise UserError("cluster.kind ray: Ray is not installed; install it: pip install 'rft-platform[ray]'")
    if os.environ.get(AUTH_VARIABLE, "").lower() != TOKEN_MODE:
        raise UserError(
            f"cluster.kind ray: {AUTH_VARIABLE} is not {TOKEN_MODE!r}, so everybody who reaches a node's ports can run "
            f"programs on it; start every node, and this command, with {AUTH_VARIABLE}={TOKEN_MODE} and the cluster's "
            "token (`ray get-auth-token --generate`)"
        )


def joined(address: str, namespace: str) -> Any:
    """The module ``ray``, after this process has joined the cluster at ``address``.

    Raises UserError for what ``check_installed`` refuses, ClusterError if the cluster cannot be reached.
    """
    global _joined
    with _joining:
        if _joined == (address, namespace):
            import ray

            if ray.is_initialized():
                return ray
        check_installed()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        before = _signal_handlers()
        try:
            import ray

            if ray.is_initialized():
                ray.shutdown()
            ray.init(address, namespace=namespace, log_to_driver=False, configure_logging=False)
        except Exception as error:  # ConnectionError, AuthenticationError, RuntimeError for other versions
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ClusterError(
                f"cannot join the Ray cluster at {address!r}: {reason[0]}; start one with `ray start --head`, or "
                "correct cluster.address"
            ) from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        _joined = (address, namespace)
        return ray


def _signal_handlers() -> dict[int, Any]:
    """The handlers that Ray replaces, if this thread can set them."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}


def node_of(node: Mapping[str, Any]) -> Node:
    """A node as Ray describes it."""
    held = node["Resources"]
    own = {
        name: amount
        for name, amount in held.items()
        if name not in ("CPU", "GPU", "memory", "object_store_memory") and not name.startswith(_NODE_RESOURCES)
    }
    return Node(node["NodeManagerAddress"], held.get("CPU", 0.0), held.get("GPU", 0.0), own)


def lost(ray: Any) -> tuple[type[BaseException], ...]:
    """The errors of a call to an actor whose process or node is gone, or cannot be reached.

    A process that Ray has killed because its node ran out of memory is gone, too.
    """
    errors = ray.exceptions
    return (
        errors.RayActorError,
        errors.GetTimeoutError,
        errors.RaySystemError,
        errors.OutOfMemoryError,
        errors.ActorUnschedulableError,
    )


def kill(ray: Any, actor: Any) -> None:
    """Kill an actor's process; nothing if it has ended."""
    with suppress(*lost(ray), ValueError):
        ray.kill(actor, no_restart=True)
