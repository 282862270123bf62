"""The two processes of tested code: one runs the program, the other runs the tests and calls the program over pipes.

``python -I`` runs this module as a file with a role (``program`` or ``tests``) and the numbers of a reading and a
writing pipe. The module imports nothing of the platform.

The process of the tests decides the verdict, and the program may send it any message. So that process builds only plain
values (numbers, texts, collections), proxies (``Remote``) and exception classes from a message, runs no code of the
program, and calls only functions that the tests have passed. Plain values are copied and compared in the process of the
tests. Any other object stays in the program's process, and its proxy equals no plain value. A message of another form,
or the end of the program, ends the process of the tests at once, so that no ``except`` of the tests can hide it.
"""

import ast
import builtins
import importlib
import json
import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TextIO

_BETWEEN = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "eq", "lt", "le")
_UNARY = ("getitem", "setitem", "delitem", "neg", "next", "str", "repr", "hash", "abs")
_LARGE_BITS = 10_000  # JSON parsers refuse integers of more than 4300 decimal digits
_LOCAL_MODULES = {**{name: name for name in sys.stdlib_module_names}, "np": "numpy", "numpy": "numpy"}


class ProgramEndedError(Exception):
    """The other process has closed its pipe."""


class Peer:
    """One end of the pipes."""

    def __init__(self, reading: TextIO, writing: TextIO) -> None:
        self._reading, self._writing = reading, writing
        self._objects: dict[int, Any] = {}  # objects of this end that the other end refers to by number
        self._numbers: dict[int, int] = {}  # their numbers by id()
        self._proxies: dict[int, Function] = {}  # one for each object of the other end
        self._exceptions: dict[str, type[Exception]] = {}  # by name; those of the program as the tests see them

    def ask(self, what: str, *arguments: Any) -> Any:
        """Send a request to the other end and return its result.

        Meanwhile the other end may call functions that were passed to it.
        """
        self._send({"ask": what, "arguments": [self.encode(value) for value in arguments]})
        while "ask" in (message := self._receive()):
            self._answer(message)
        if "error" in message:
            raise self._error(what, message["error"], message["text"])
        return self._result(what, arguments, message)

    def _result(self, what: str, arguments: tuple[Any, ...], message: dict[str, Any]) -> Any:
        if what == "call":
            for mine, theirs in zip(arguments[1:], message["changed"], strict=True):
                _take_over(mine, self.decode(theirs))
        return self.decode(message["value"])

    def _answer(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _proxy(self, number: int) -> "Function":
        raise NotImplementedError

    def _reply_to_call(self, function: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        value = function(*positional, **named)
        return {"value": self.encode(value), "changed": [self._changed(positional), self._changed(named)]}

    def _changed(self, value: Any) -> Any:
        try:
            return self.encode(value)
        except TypeError:
            return None

    def _reply_with(self, error: BaseException) -> dict[str, Any]:
        names = _exception_names(type(error))
        return {"error": names, "text": str(error) if names else f"{type(error).__name__}: {error}"}

    def _send(self, message: dict[str, Any]) -> None:
        self._writing.write(json.dumps(message) + "\n")
        self._writing.flush()

    def _receive(self) -> dict[str, Any]:
        line = self._reading.readline()
        if not line:
            raise ProgramEndedError("the program has ended")
        message: dict[str, Any] = json.loads(line)
        return message

    def encode(self, value: Any) -> Any:
        """Encode a value: plain values as values, other objects as numbers that refer to them.

        Raises TypeError for a value that must not be sent.
        """
        is_small = type(value) is int and value.bit_length() <= _LARGE_BITS
        if value is None or is_small or type(value) in (bool, float, str):
            return value
        if isinstance(value, Function):
            return {"yours": object.__getattribute__(value, "_rpc_number")}
        for kind, parts in _COLLECTIONS.items():
            if isinstance(value, kind):
                return {"kind": kind.__name__, "value": [self.encode(part) for part in parts(value)]}
        if isinstance(value, int) and int.bit_length(value) > _LARGE_BITS:
            return {"kind": "int", "value": int.__format__(value, "x")}
        for basic in (bool, int, float, str):  # an object of a subclass loses its class and its own equality
            if isinstance(value, basic):
                return basic.__call__(value) if basic is not str else str.__str__(value)
        if isinstance(value, bytes | bytearray):
            return {"kind": "bytes", "value": bytes(value).decode("latin-1")}
        if isinstance(value, complex | Decimal | Fraction):
            return {"kind": type(value).__name__, "value": str(value)}
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self.encode(value.tolist())
        return self._refer_to(value)

    def _refer_to(self, value: Any) -> dict[str, Any]:
        number = self._numbers.setdefault(id(value), len(self._numbers) + 1)
        self._objects[number] = value
        return {"mine": number}

    def decode(self, wire: Any) -> Any:
        """Decode what the other end has encoded. Raises an exception for anything else."""
        if wire is None or isinstance(wire, bool | int | float | str):
            return wire
        if "yours" in wire:
            return self._objects[wire["yours"]]
        if "mine" in wire:
            number = int(wire["mine"])
            if number not in self._proxies:
                self._proxies[number] = self._proxy(number)
            return self._proxies[number]
        kind, value = wire["kind"], wire["value"]
        if kind in _TEXTS:
            return _TEXTS[kind](value)
        parts = list(map(self.decode, value))
        return dict(parts) if kind == "dict" else _SEQUENCES[kind](parts)

    def _error(self, what: str, names: list[str], text: str) -> Exception:
        kind = self._exception_class(names)
        if what != "next" and issubclass(kind, StopIteration | StopAsyncIteration):
            kind = RuntimeError  # as in a generator (PEP 479): it must not end a loop over map(function, values)
        try:
            return kind(text)
        except TypeError:  # a class that needs more arguments
            return RuntimeError(f"{kind.__name__}: {text}")

    def _exception_class(self, names: list[str]) -> type[Exception]:
        """The exception class with these names of classes, its own first: a builtin, or a new one without members."""
        bases: tuple[type[Exception], ...] = (Exception,)
        for name in reversed(names):
            known = getattr(builtins, name, None)
            if not (isinstance(known, type) and issubclass(known, Exception)):
                known = self._exceptions.get(name) or self._exceptions.setdefault(name, type(name, bases, {}))
            bases = (known, *(base for base in bases if not issubclass(known, base)))
        return bases[0]


class ProgramPeer(Peer):
    """The end in the program's process. It does what the tests request."""

    def serve(self, names: dict[str, Any]) -> None:
        """Answer requests until the other end is gone."""
        self._objects[0] = names
        with suppress(ProgramEndedError):
            while True:
                self._answer(self._receive())

    def _proxy(self, number: int) -> "Function":
        return Function(self, number)

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            arguments = [self.decode(value) for value in message["arguments"]]
            if message["ask"] == "call":
                reply = self._reply_to_call(*arguments)
            elif message["ask"] == "names":
                reply = {"value": self._encoded_names()}
            else:
                reply = {"value": self.encode(_OPERATIONS[message["ask"]](*arguments))}
        except ProgramEndedError:
            raise
        except BaseException as error:
            reply = self._reply_with(error)
        self._send(reply)

    def _encoded_names(self) -> Any:
        names = []
        for name, value in self._objects[0].items():
            if not name.startswith("__"):
                try:
                    wire = self.encode(value)
                except RecursionError:  # a collection that contains itself
                    wire = self._refer_to(value)
                names.append({"kind": "tuple", "value": [name, wire]})
        return {"kind": "dict", "value": names}

    def _refer_to(self, value: Any) -> dict[str, Any]:
        reference = super()._refer_to(value)
        if isinstance(value, type) and issubclass(value, Exception):
            reference["exception"] = _exception_names(value)
            self._exceptions[value.__name__] = value
        return reference

    def decode(self, wire: Any) -> Any:
        """Decode what the tests have encoded."""
        return (
            getattr(builtins, wire["builtin"]) if isinstance(wire, dict) and "builtin" in wire else super().decode(wire)
        )


class TestsPeer(Peer):
    """The end in the process of the tests. It trusts no message."""

    def __init__(self, reading: TextIO, writing: TextIO) -> None:
        super().__init__(reading, writing)
        self._classes: dict[type, int] = {}  # numbers of the program's exception classes
        self.changes = 0  # requests that may have changed objects of the program

    def ask(self, what: str, *arguments: Any) -> Any:
        """Send a request to the program; return its result: a plain value, a proxy or an exception class."""
        self.changes += what not in _READS
        return super().ask(what, *arguments)

    def _proxy(self, number: int) -> "Function":
        return Remote(self, number)

    def _result(self, what: str, arguments: tuple[Any, ...], message: dict[str, Any]) -> Any:
        with _ends_on_error():
            return super()._result(what, arguments, message)

    def _answer(self, message: dict[str, Any]) -> None:
        """Call a function that the tests have passed to the program."""
        with _ends_on_error():
            if message["ask"] != "call":
                raise PermissionError("a program can only call what the tests pass to it")
            function, positional, named = message["arguments"]
            function = self._objects[function["yours"]]
            positional, named = self.decode(positional), self.decode(named)
            if type(positional) is not tuple or type(named) is not dict:
                raise TypeError("expected a tuple and a dict of arguments")
        try:
            reply = self._reply_to_call(function, positional, named)
        except BaseException as error:
            if isinstance(error, AssertionError) or not isinstance(error, Exception):  # the program must not hide it
                _end(traceback.format_exc())
            reply = self._reply_with(error)
        self._send(reply)

    def _send(self, message: dict[str, Any]) -> None:
        with _ends_on_error():
            super()._send(message)

    def _receive(self) -> dict[str, Any]:
        with _ends_on_error():
            message = super()._receive()
            if not (
                type(message) is dict
                and ("ask" in message or {"error", "text"} <= message.keys() or "value" in message)
            ):
                raise ValueError(f"unknown message: {str(message)[:200]}")
            return message

    def _refer_to(self, value: Any) -> dict[str, Any]:
        if isinstance(value, type) and value in self._classes:
            return {"yours": self._classes[value]}
        if not callable(value):
            raise TypeError(f"a test cannot pass a {type(value).__name__} to the program")
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, None) is value:  # the program must not call our type()
            return {"builtin": name}
        return super()._refer_to(value)

    def decode(self, wire: Any) -> Any:
        """Decode what the program has sent. Anything that ``encode`` does not produce ends the process."""
        with _ends_on_error():
            if not (isinstance(wire, dict) and "exception" in wire):
                return super().decode(wire)
            kind = self._exception_class(wire["exception"])
            if kind in (Exception, AssertionError):  # ``except`` of such a name would also catch a failed assert
                kind = type(kind.__name__, (kind,), {})
            self._classes[kind] = int(wire["mine"])
            return kind

    def _error(self, what: str, names: list[str], text: str) -> Exception:
        with _ends_on_error():
            return super()._error(what, names, str(text))


def _exception_names(kind: type[BaseException]) -> list[str]:
    return [base.__name__ for base in kind.__mro__ if issubclass(base, Exception)]


@contextmanager
def _ends_on_error() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        _end(f"the program has ended or sent an invalid message: {type(error).__name__}: {error}\n")


def _end(message: str) -> NoReturn:
    os.write(2, message.encode("utf-8", "replace"))
    os._exit(1)


_COLLECTIONS: dict[type, Callable[[Any], Any]] = {
    dict: lambda value: [tuple(item) for item in dict.items(value)],
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_TEXTS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": lambda text: text.encode("latin-1"),
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


class Function:
    """Proxy of a function of the tests, in the program's process."""

    __slots__ = ("_rpc_number", "_rpc_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_rpc_peer", peer)
        object.__setattr__(self, "_rpc_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _ask(self, "call", arguments, named)


class Remote(Function):
    """Proxy of an object of the program, in the process of the tests.

    An operator or predicate between the object and a plain value is refused, as the program could answer what the test
    hopes for. Length and items come from one copy, so that they agree with each other.
    """

    __slots__ = ("_rpc_copied",)

    def __init__(self, peer: Peer, number: int) -> None:
        super().__init__(peer, number)
        object.__setattr__(self, "_rpc_copied", (-1, {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _SPECIAL_ATTRIBUTES:
            raise AttributeError(name)  # libraries look these up, and trust what they get
        value = _ask(self, "getattr", name)
        return _predicate(name, value) if name in _PREDICATES and isinstance(value, Remote) else value

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __iter__(self) -> Iterator[Any]:
        items = _copied(self, "items")
        if items is None:
            raise TypeError("an object of the program is not iterable, or its length is not the number of its items")
        return iter(items) if isinstance(items, tuple) else items

    def __len__(self) -> int:
        items = _copied(self, "items")
        if isinstance(items, Remote):
            raise TypeError("an iterator of the program has no len()")
        return len(items) if isinstance(items, tuple) else _copied(self, "len")

    def __bool__(self) -> bool:
        items = _copied(self, "items")
        if isinstance(items, Remote):
            raise TypeError(
                "an iterable of the program without a length is neither true nor false: copy it with list()"
            )
        return _ask(self, "bool") is True and items != ()

    def __contains__(self, value: Any) -> bool:
        return value in tuple(self)  # all items first: they must not depend on the value

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and _ask(value, "isinstance", self) is True

    def __ne__(self, other: Any) -> bool:
        return not self == other


def _ask(remote: Function, what: str, *arguments: Any) -> Any:
    peer: Peer = object.__getattribute__(remote, "_rpc_peer")
    return peer.ask(what, remote, *arguments)


def _copied(remote: Remote, what: str) -> Any:
    """Ask for the items or the length once, until a request may have changed objects of the program."""
    peer: Any = object.__getattribute__(remote, "_rpc_peer")
    changes, copies = object.__getattribute__(remote, "_rpc_copied")
    if changes != peer.changes:
        copies = {}
        object.__setattr__(remote, "_rpc_copied", (peer.changes, copies))
    if what not in copies:
        copies[what] = peer.ask(what, remote)
    value = copies[what]
    if not (type(value) is int if what == "len" else value is None or isinstance(value, tuple | Remote)):
        _end(f"the program sent {type(value).__name__} as {what}\n")
    return value


def _items(value: Any) -> Any:
    """The items of a container, the iterator of an object without a length, None if there are no items."""
    try:
        iterator = iter(value)
        if iterator is value or not hasattr(type(value), "__len__"):
            return iterator
        items = tuple(islice(iterator, len(value) + 1))
        return items if len(items) == len(value) else None
    except Exception:
        return None


def _predicate(name: str, method: Remote) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        if not arguments or not all(isinstance(argument, Remote) for argument in arguments):
            raise TypeError(f"{name}() of an object of the program decides nothing: only copied values count")
        return method(*arguments)

    return call


def _forwarded(name: str, what: str, between: bool) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any) -> Any:
        if between and not isinstance(arguments[0], Remote):
            return NotImplemented  # a program's comparison of its object with a plain value does not count
        return _ask(self, what, *arguments)

    method.__name__ = name
    return method


for _name in _BETWEEN:
    setattr(Remote, f"__{_name.strip('_')}__", _forwarded(_name, _name, between=True))
for _name in _UNARY:
    setattr(Remote, f"__{_name}__", _forwarded(_name, _name, between=False))

_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*_BETWEEN, "getitem", "setitem", "delitem", "neg")},
    **{f.__name__: f for f in (len, next, str, repr, bool, hash, abs, isinstance, getattr, setattr)},
    "items": _items,
}
_READS = ("names", "items", "len", "bool", "str", "repr", "hash", "isinstance", "getattr", "eq", "lt", "le")
_SPECIAL_ATTRIBUTES = ("__name__", "__qualname__", "__dict__")
_PREDICATES = {  # methods of plain values that answer yes or no
    name
    for kind in (str, bytes, set, float)
    for name in dir(kind)
    if name.startswith("is") or name in ("startswith", "endswith")
}


def hold_program(peer: ProgramPeer, file: str) -> None:
    """Run a program, then answer the requests of the tests."""
    source = Path(file).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), names)
    peer.serve(names)


def run_tests(peer: TestsPeer) -> None:
    """Run the tests from standard input. The first line of the input is printed after all tests have passed."""
    word, source = sys.stdin.readline(), sys.stdin.read()
    program, code = peer.ask("names"), ast.parse(source)
    names = {name: value for name, value in program.items() if name not in vars(builtins) and not name.startswith("__")}
    # A program must not replace ``abs`` or ``math.isclose`` as the tests use them.
    for name in {n.value.id for n in ast.walk(code) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}:
        if name in _LOCAL_MODULES:
            names.pop(name, None)
            with suppress(ImportError):
                names[name] = importlib.import_module(_LOCAL_MODULES[name])
    exec(compile(code, "tests", "exec"), {"__name__": "__main__", **names})
    print(f"\n{word}", end="", flush=True)


def main() -> None:
    """Run the role that the arguments name."""
    part, reading, writing = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with open(reading, encoding="utf-8") as from_other, open(writing, "w", encoding="utf-8") as to_other:
        if part == "program":
            hold_program(ProgramPeer(from_other, to_other), sys.argv[4])
        else:
            run_tests(TestsPeer(from_other, to_other))


if __name__ == "__main__":
    main()
