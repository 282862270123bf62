"""The two processes of tested code: one runs the program, the other runs the tests and calls the program over pipes.

``python -I`` runs this module as a file with a role (``program`` or ``tests``) and the numbers of a reading and a
writing pipe. The module imports nothing of the platform.

The program cannot change the process of the tests. Only plain values count as results of the program: numbers, texts
and collections of them are copied, and compared in the process of the tests. Any other object stays in the program's
process; the tests call and read it remotely, and it equals no plain value.
"""

import ast
import builtins
import json
import operator
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

_BETWEEN = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "eq", "lt", "le")
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*_BETWEEN, "getitem", "setitem", "delitem", "neg")},
    **{f.__name__: f for f in (len, iter, next, str, repr, bool, hash, abs, isinstance, getattr, setattr)},
}


class Peer:
    """One end of the pipes."""

    def __init__(self, reading: TextIO, writing: TextIO, holds_program: bool) -> None:
        self._reading, self._writing, self._holds_program = reading, writing, holds_program
        self._mine: dict[int, Any] = {}  # objects that the other end refers to by number
        self.errors: dict[str, type[Exception]] = {}  # the program's, by name, as the tests see them

    def ask(self, what: str, *arguments: Any) -> Any:
        """Send a request to the other end and return its result.

        Meanwhile the other end may call functions that were passed to it.
        """
        self._send({"ask": what, "given": [self.encode(value) for value in arguments]})
        while "ask" in (message := self._next()):
            self._answer(message)
        if "error" in message:
            name, text = str(message["error"]), str(message.get("text", ""))
            kind = getattr(builtins, name, None) or self.errors.get(name)
            if isinstance(kind, type) and issubclass(kind, Exception):
                raise kind(text)
            raise RuntimeError(f"{name}: {text}")
        for mine, theirs in zip(arguments, message.get("changed", ()), strict=False):
            _take_over(mine, self.decode(theirs))
        return self.decode(message["value"])

    def serve(self, names: dict[str, Any]) -> None:
        """Answer requests until the other end is gone."""
        self._mine[0] = names
        while True:
            try:
                self._answer(self._next())
            except EOFError:
                return

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            arguments = [self.decode(value) for value in message["given"]]
            value, changed = self._do(message["ask"], arguments)
            self._send({"value": self.encode(value), "changed": changed})
        except EOFError:
            raise
        except BaseException as error:
            self._send({"error": type(error).__name__, "text": str(error)})

    def _do(self, what: str, arguments: list[Any]) -> tuple[Any, list[Any]]:
        if what == "call":
            function, positional, named = arguments
            value = function(*positional, **named)
            return value, [None, self._changed(positional), self._changed(named)]
        if not self._holds_program:
            raise PermissionError("a program may only call functions that the tests pass to it")
        if what == "names":
            return {name: value for name, value in self._mine[0].items() if not name.startswith("__")}, []
        return _OPERATIONS[what](*arguments), []

    def _changed(self, value: Any) -> Any:
        try:
            return self.encode(value)
        except TypeError:
            return None

    def _send(self, message: dict[str, Any]) -> None:
        self._writing.write(json.dumps(message) + "\n")
        self._writing.flush()

    def _next(self) -> dict[str, Any]:
        line = self._reading.readline()
        if not line:
            raise EOFError("the program has ended")
        message: dict[str, Any] = json.loads(line)
        return message

    def encode(self, value: Any) -> Any:
        """Encode a value: plain values as values, other objects as numbers that refer to them.

        Raises TypeError for a value that must not be sent.
        """
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Remote):
            return {"yours": object.__getattribute__(value, "_number")}
        for kind, parts in _COLLECTIONS.items():
            if isinstance(value, kind):
                return {"kind": kind.__name__, "value": [self.encode(part) for part in parts(value)]}
        for basic in (bool, int, float, str):  # an object of a subclass loses its class and its own equality
            if isinstance(value, basic):
                return basic.__call__(value) if basic is not str else str.__str__(value)
        if isinstance(value, bytes | bytearray):
            return {"kind": "bytes", "value": bytes(value).decode("latin-1")}
        if isinstance(value, complex | Decimal | Fraction):
            return {"kind": type(value).__name__, "value": str(value)}
        if isinstance(value, ModuleType):
            return {"kind": "module", "value": value.__name__}
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self.encode(value.tolist())
        if not self._holds_program and not callable(value):
            raise TypeError(f"a test cannot pass a {type(value).__name__} to the program")
        self._mine[id(value)] = value
        reference: dict[str, Any] = {"mine": id(value)}
        if isinstance(value, type) and issubclass(value, Exception):
            reference["raised"] = [base.__name__ for base in value.__mro__]
        return reference

    def decode(self, wire: Any) -> Any:
        """Decode what the other end has encoded."""
        if not isinstance(wire, dict):
            return wire
        if "yours" in wire:
            return self._mine[wire["yours"]]
        if "raised" in wire:
            name, *bases = wire["raised"]
            base = next(getattr(builtins, b) for b in bases if hasattr(builtins, b))
            return self.errors.setdefault(name, type(name, (base,), {}))
        if "mine" in wire:
            return Remote(self, wire["mine"])
        kind, value = wire["kind"], wire["value"]
        if kind == "module":
            return __import__(value) if value in sys.stdlib_module_names else None
        if kind == "bytes":
            return value.encode("latin-1")
        if kind == "dict":
            return dict(map(self.decode, value))
        return _KINDS[kind](map(self.decode, value)) if isinstance(value, list) else _KINDS[kind](value)


_COLLECTIONS: dict[type, Callable[[Any], Any]] = {
    dict: lambda value: [tuple(item) for item in dict.items(value)],
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
}
_KINDS: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: kind for kind in _COLLECTIONS},
    **{kind.__name__: kind for kind in (complex, Decimal, Fraction)},
}


def _take_over(mine: Any, theirs: Any) -> None:
    """Apply the changes that the program made to collections among its arguments."""
    if type(mine) is not type(theirs):
        return
    if isinstance(mine, tuple):
        for old, new in zip(mine, theirs, strict=False):
            _take_over(old, new)
    elif isinstance(mine, list):
        for index, (old, new) in enumerate(zip(mine, theirs, strict=False)):
            if isinstance(old, list | dict | set) and type(old) is type(new):
                _take_over(old, new)
                theirs[index] = old
        mine[:] = theirs
    elif isinstance(mine, dict):
        for key, new in list(theirs.items()):
            if isinstance(mine.get(key), list | dict | set) and type(mine[key]) is type(new):
                _take_over(mine[key], new)
                theirs[key] = mine[key]
        mine.clear()
        mine.update(theirs)
    elif isinstance(mine, set):
        mine.clear()
        mine.update(theirs)


class Remote:
    """Proxy of an object of the other end."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _ask(self, "call", arguments, named)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __iter__(self) -> Iterator[Any]:
        found = _ask(self, "iter")
        return iter(found) if not isinstance(found, Remote) else found

    def __contains__(self, value: Any) -> bool:
        return any(part == value for part in self)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and bool(_ask(value, "isinstance", self))

    def __ne__(self, other: Any) -> bool:
        return not self == other


def _ask(remote: Remote, what: str, *arguments: Any) -> Any:
    peer: Peer = object.__getattribute__(remote, "_peer")
    return peer.ask(what, remote, *arguments)


def _forwarded(name: str, what: str, between: bool) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any) -> Any:
        if between and not isinstance(arguments[0], Remote):
            return NotImplemented  # a program's comparison of its object with a plain value does not count
        return _ask(self, what, *arguments)

    method.__name__ = name
    return method


for _name in _BETWEEN:
    setattr(Remote, f"__{_name.strip('_')}__", _forwarded(_name, _name, between=True))
for _name in ("getitem", "setitem", "delitem", "neg", "len", "next", "str", "repr", "bool", "hash", "abs"):
    setattr(Remote, f"__{_name}__", _forwarded(_name, _name, between=False))


def hold_program(peer: Peer, file: str) -> None:
    """Run a program, then answer the requests of the tests."""
    source = Path(file).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), names)
    peer.serve(names)


def run_tests(peer: Peer) -> None:
    """Run the tests from standard input. The first line of the input is printed after all tests have passed."""
    word, source = sys.stdin.readline(), sys.stdin.read()
    program, code = peer.ask("names"), ast.parse(source)
    # A program must not replace ``abs`` or ``math.isclose`` as the tests use them.
    looked_into = {n.value.id for n in ast.walk(code) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    taken = {*vars(builtins), *(looked_into & sys.stdlib_module_names)}
    found = {name: value for name, value in program.items() if name not in taken or isinstance(value, ModuleType)}
    exec(compile(code, "tests", "exec"), {"__name__": "__main__", **found})
    print(f"\n{word}", end="", flush=True)


def main() -> None:
    """Run the role that the arguments name."""
    part, reading, writing = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with open(reading, encoding="utf-8") as from_other, open(writing, "w", encoding="utf-8") as to_other:
        peer = Peer(from_other, to_other, holds_program=part == "program")
        if part == "program":
            hold_program(peer, sys.argv[4])
        else:
            run_tests(peer)


if __name__ == "__main__":
    main()
