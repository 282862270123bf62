"""Programs that try to pass tests without solving them: no attack changes the verdict; honest programs pass."""

import textwrap

import pytest

from rft_platform.judging.sandbox.run_program import Limits, run_tested

from .test_judging_code import judged

LIMITS = Limits(wall_s=60.0, cpu_s=3, memory_mb=1024)

#: What test authors write, by name. No attack may pass one of these.
STYLES = {
    "equality": "assert add(2, 3) == 5",
    "reversed equality": "assert 5 == add(2, 3)",
    "inequality": "assert not (add(2, 3) != 5)",
    "list": "assert order([3, 1, 2]) == [1, 2, 3]",
    "text": "assert reverse('abc') == 'cba'",
    "dict": "assert count('aab') == {'a': 2, 'b': 1} and count('aab')['a'] == 2",
    "candidate": """
def check(candidate):
    assert abs(candidate(2.0) - 4.0) < 1e-6
    assert candidate(3) == 9
check(square)
""",
    "tolerance": "assert abs(4.0 - square(2.0)) < 1e-6 and abs(square(2.0) / 4.0 - 1) < 1e-6",
    "bounds": "assert 3 < square(2) < 5",
    "isclose": """
import math
assert math.isclose(square(2), 4)
""",
    "isclose without an import": "assert math.isclose(square(2), 4)",
    "isinstance": """
result = add(2, 3)
assert isinstance(result, int) and result == 5
""",
    "type": """
result = add(2, 3)
assert type(result) is int and result == 5
""",
    "class": """
result = add(2, 3)
assert result.__class__ is int and result == 5
""",
    "texts of numbers": """
assert str(square(4)) == '16' and f'{square(4)}' == '16' and '%d' % square(4) == '16'
""",
    "conversion": """
assert int(square(4)) == 16 or float(square(4)) == 16.0 or round(square(4)) == 16
""",
    "one of": "assert add(2, 3) in (5, 6)",
    "one of a set": "assert add(2, 3) in {5, 6}",
    "contains": "assert 2 in order([3, 1, 2]) and 3 in order([3, 1, 2])",
    "set": "assert set(order([3, 1, 2])) == {1, 2, 3} and {1, 2} <= set(order([3, 1, 2]))",
    "sorted": "assert sorted(order([3, 1, 2])) == [1, 2, 3] and sum(order([3, 1, 2])) == 6",
    "zip": """
out = order([3, 1, 2])
assert len(out) == 3
for a, b in zip(out, [1, 2, 3]):
    assert a == b
""",
    "index loop": """
out = order([3, 1, 2])
assert len(out) == 3
for i in range(len(out)):
    assert out[i] == i + 1
""",
    "not empty": """
out = order([30, 10, 20])
assert out
for value in out:
    assert value in (10, 20, 30)
""",
    "map": "assert all(map(lambda case: square(case[0]) == case[1], [(2, 4), (3, 9)]))",
    "loop over map": """
number = 0
for value in map(square, [2, 3]):
    number += 1
    assert value == (number + 1) ** 2
assert number < 3 and square(2) == 4
""",
    "starts with": "assert reverse('abc').startswith('cb')",
    "is of letters": "assert reverse('abc').isalpha() and reverse('12').isdigit()",
    "subset": """
found = set_of('aab')
assert len(found) == 2 and found.issubset({'a', 'b'}) and found.isdisjoint({'c'})
""",
    "attribute": "assert make(3).value == 9",
    "method": "assert make(3).plus(1) == 10",
    "call of a result": "assert adder(2)(3) == 5",
    "iterator": """
values = evens(3)
assert next(values) == 0 and list(values) == [2, 4]
""",
    "expected exception": """
try:
    refuse(-1)
    assert False
except InvalidInput:
    pass
""",
    "callback": """
def twice(value):
    assert value == 7
    return 2 * value
assert call_with_7(twice) == 14
""",
    "swallowed callback": """
seen = []
def see(value):
    seen.append(value)
    assert value == 7
call_with_7(see)
assert seen == [7]
""",
    "builtin callback": "assert apply(type, 5) == 'int' and apply(len, 'abc') == 3",
    "in place": """
values = [3, 1, 2]
sort_in_place(values)
assert values == [1, 2, 3]
""",
    "unittest": """
import unittest
test = unittest.TestCase()
test.assertEqual(add(2, 3), 5)
test.assertAlmostEqual(square(2.0), 4.0)
test.assertListEqual(order([2, 1]), [1, 2])
""",
    "counter": """
from collections import Counter
assert Counter(order([2, 1])) == Counter([1, 2])
""",
    "numpy": """
import numpy as np
assert np.allclose(order([2, 1]), [1, 2])
np.testing.assert_allclose(square(2.0), 4.0)
""",
}
NAMES = ["add", "order", "reverse", "count", "square", "set_of", "make", "adder", "evens", "refuse", "call_with_7"]
NAMES += ["apply", "sort_in_place"]

HONEST = """
import math
def add(a, b): return a + b
def order(values): return sorted(values)
def reverse(text): return text[::-1]
def count(text): return {letter: text.count(letter) for letter in text}
def square(x): return x * x
def set_of(text): return set(text)
class Made:
    def __init__(self, x): self.value = x * x
    def plus(self, y): return self.value + y
def make(x): return Made(x)
def adder(x): return lambda y: x + y
def evens(n): yield from range(0, 2 * n, 2)
class InvalidInput(ValueError): ...
def refuse(x): raise InvalidInput("negative")
def call_with_7(function): return function(7)
def apply(function, value):
    result = function(value)
    return result.__name__ if isinstance(result, type) else result
def sort_in_place(values): values.sort()
"""

_EVERYTHING = """
_DUNDERS = ("lt le eq gt ge add radd sub rsub mul rmul truediv rtruediv mod pow and rand or ror xor contains call "
            "index int float complex round trunc floor ceil abs neg pos bool enter exit await instancecheck").split()
def first_items(self, index):
    if index > 5: raise IndexError
    return True
"""

#: Programs without a solution, by what they try. Every function of the tests is their ``solve``.
ATTACKS = {
    "equals anything": _EVERYTHING
    + """
class Any:
    def __getattr__(self, name): return lambda *a, **k: True
for name in _DUNDERS: setattr(Any, f'__{name}__', lambda *a, **k: True)
Any.__ne__ = lambda *a: False
Any.__hash__ = lambda self: hash(5)
Any.__getitem__ = first_items
def solve(*a): return Any()
""",
    "differences of zero": _EVERYTHING
    + """
class Any:
    value = 0
for name in _DUNDERS: setattr(Any, f'__{name}__', lambda *a, **k: 0)
Any.__eq__ = lambda *a: True
Any.__lt__ = Any.__le__ = lambda *a: True
def solve(*a): return Any()
""",
    "claims a class": """
class Any:
    __class__ = property(lambda self: int)
    __eq__ = lambda *a: True
    __hash__ = lambda self: 5
def solve(*a): return Any()
""",
    "subclass of int": """
class N(int):
    __eq__ = __lt__ = __gt__ = __le__ = lambda *a: True
    __sub__ = __rsub__ = lambda *a: 0
    __str__ = lambda self: '16'
    __hash__ = int.__hash__
def solve(*a): return N(0)
""",
    "subclass of float": """
class N(float):
    __eq__ = __lt__ = __gt__ = lambda *a: True
    __abs__ = lambda self: 0
    __hash__ = float.__hash__
def solve(*a): return N('nan')
""",
    "subclass of str": """
class T(str):
    __eq__ = startswith = endswith = isalpha = isdigit = lambda *a: True
    __hash__ = str.__hash__
def solve(*a): return T('')
""",
    "subclass of list": """
class L(list):
    __eq__ = __contains__ = lambda *a: True
    __len__ = lambda self: 3
def solve(*a): return L()
""",
    "subclass of dict": """
class D(dict):
    __eq__ = lambda *a: True
    __missing__ = lambda self, key: 2
def solve(*a): return D()
""",
    "subclass of set": """
class S(set):
    __eq__ = __ge__ = __contains__ = issubset = lambda *a: True
def solve(*a): return S()
""",
    "not a number": "def solve(*a): return float('nan')",
    "list of not a number": "def solve(*a): return [float('nan')] * 3",
    "infinity": "def solve(*a): return float('inf')",
    "huge number": "def solve(*a): return 10 ** 20000",
    "text of its arguments": """
class Any:
    def __init__(self, *a): self.a = a
    __str__ = __repr__ = lambda self: '16'
    __format__ = lambda self, spec: '16'
def solve(*a): return Any(*a)
""",
    "length without items": """
class Any:
    def __init__(self, a): self.a = a
    __len__ = lambda self: len(self.a)
    __iter__ = lambda self: iter(())
    __bool__ = lambda self: True
def solve(a): return Any(a)
""",
    "length that changes": """
class Any:
    def __init__(self, a): self.a = a; self.asked = 0
    def __len__(self):
        self.asked += 1
        return len(self.a) if self.asked < 2 else 0
    __getitem__ = lambda self, i: i
def solve(a): return Any(a)
""",
    "items that appear": """
class Any:
    n = 0
    def __len__(self): Any.n += 1; return 3 if Any.n == 1 else 0
    def __iter__(self): return iter([0] * 3) if Any.n == 1 else iter(())
def solve(*a): return Any()
""",
    "true iterator without items": "def solve(*a): return iter(())",
    "object of another class": """
from unittest.mock import MagicMock
def solve(*a): return MagicMock()
""",
    "function": "def solve(*a): return solve",
    "class with a metaclass": """
class M(type):
    __eq__ = __lt__ = __instancecheck__ = __call__ = lambda *a, **k: True
    __hash__ = type.__hash__
    __sub__ = __rsub__ = __abs__ = lambda *a: 0
class solve(metaclass=M): ...
""",
    "exception class": """
class solve(Exception):
    __eq__ = __lt__ = lambda *a: True
    __sub__ = __abs__ = lambda *a: 0
    value = 9
    __str__ = lambda self: '16'
""",
    "exception object": """
class E(Exception):
    __eq__ = lambda *a: True
def solve(*a): return E(5)
""",
    "raises StopIteration": "def solve(*a): raise StopIteration",
    "raises a subclass of StopIteration": """
class End(StopIteration): ...
def solve(*a): raise End
""",
    "raises SystemExit": "def solve(*a): raise SystemExit(0)",
    "raises KeyboardInterrupt": "def solve(*a): raise KeyboardInterrupt",
    "raises GeneratorExit": "def solve(*a): raise GeneratorExit",
    "raises an own BaseException": """
class E(BaseException): ...
def solve(*a): raise E
""",
    "raises an own SystemExit": """
class SystemExit(Exception): ...
def solve(*a): raise SystemExit
""",
    "raises AssertionError": "def solve(*a): raise AssertionError",
    "renames AssertionError": """
InvalidInput = AssertionError
def solve(*a): return 0
""",
    "renames Exception": """
InvalidInput = Exception
def solve(*a): return 0
""",
    "renames BaseException": """
InvalidInput = BaseException
def solve(*a): return 0
""",
    "renames object": """
InvalidInput = object
def solve(*a): return 0
""",
    "tuple of exceptions": """
InvalidInput = (AssertionError, Exception)
def solve(*a): return 0
""",
    "suppressing context": """
class C:
    __enter__ = lambda self: self
    __exit__ = lambda *a: True
def solve(*a): return C()
""",
    "array": """
import numpy
class A:
    __array_interface__ = {'shape': (), 'typestr': '<f8', 'version': 3, 'data': b'0' * 8}
    __array__ = lambda self, *a, **k: numpy.array([1, 2])
    __array_ufunc__ = lambda *a, **k: True
    __array_function__ = lambda *a, **k: True
    __float__ = lambda self: 4.0
    dtype = 'float64'
    shape = ()
    ndim = 0
    all = any = lambda *a, **k: True
def solve(*a): return A()
""",
    "replaces modules": """
import sys, types, builtins
fake = types.SimpleNamespace(isclose=lambda *a, **k: True, fabs=lambda x: 0)
math = np = numpy = unittest = fake
sys.modules['math'] = fake
abs = len = all = isinstance = builtins.abs = builtins.all = builtins.sorted = lambda *a, **k: True
def solve(*a): return 0
""",
    "other module under a name": """
import cmath as math, operator as np
def solve(*a): return complex('nan')
""",
    "swallows the errors of callbacks": """
def solve(*a):
    for f in a:
        try:
            f(0)
        except BaseException:
            pass
    return 0
""",
    "calls tests' functions with objects": """
class Any:
    __eq__ = lambda *a: True
    __mul__ = __rmul__ = lambda *a: 14
def solve(f, *a): return f(Any()) if callable(f) else 0
""",
    "ends when it is called": """
import os
def solve(*a): os._exit(0)
""",
    "ends itself by a signal": """
import os, signal
def solve(*a): os.kill(os.getpid(), signal.SIGKILL)
""",
    "closes its pipes": """
import os
def solve(*a): os.closerange(0, 64)
""",
    "is deep": """
def solve(*a):
    value = []
    for _ in range(100_000): value = [value]
    return value
""",
    "contains itself": """
value = []
value.append(value)
def solve(*a): return value
""",
    "keys that are objects": """
class Any:
    __eq__ = lambda *a: True
    __hash__ = lambda self: hash('a')
def solve(*a): return {Any(): 2}
""",
    "items that are objects": """
class Any:
    __eq__ = __lt__ = __le__ = lambda *a: True
    __hash__ = lambda self: 1
    __radd__ = lambda *a: 6
def solve(*a): return [Any()] * 3
""",
    "empties its arguments": """
def solve(*a):
    for x in a:
        getattr(x, 'clear', int)()
    return []
""",
}
QUICK = ("equals anything", "exception class", "raises StopIteration", "renames AssertionError", "length without items")


def harness(styles: list[str]) -> str:
    """Test code that tries each style and prints the names of those that it has tried and that passed."""
    return "\n".join(
        f"print('tried:', {name!r}, flush=True)\ntry:\n{textwrap.indent(STYLES[name], '    ')}\n"
        f"    print('passed:', {name!r}, flush=True)\nexcept BaseException:\n    pass"
        for name in styles
    )


async def passed_styles(program: str, styles: list[str]) -> list[str]:
    """The styles that a program passes. A style that ends the process of the tests has failed."""
    passed, remaining = [], list(styles)
    while remaining:
        outcome = await run_tested(program, harness(remaining), LIMITS)
        lines = [line.partition(": ")[::2] for line in outcome.stdout.splitlines() if ": " in line]
        tried = [name for kind, name in lines if kind == "tried"]
        assert tried, outcome.stderr
        passed += [name for kind, name in lines if kind == "passed"]
        remaining = remaining[len(tried) :]
    return passed


def with_all_names(attack: str) -> str:
    defined = "" if "InvalidInput" in attack else "class InvalidInput(Exception): ...\n"
    return f"{defined}{attack}\n{' = '.join(NAMES)} = solve\n"


async def test_an_honest_program_passes_every_style() -> None:
    assert await passed_styles(HONEST, list(STYLES)) == list(STYLES)


@pytest.mark.parametrize(
    "attack", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ATTACKS]
)
async def test_no_attack_passes_a_style(attack: str) -> None:
    assert await passed_styles(with_all_names(ATTACKS[attack]), list(STYLES)) == []


#: Speaks the protocol itself. ``say`` sends any message, ``hear`` returns the next one.
_RAW = """
import json, sys
peer = sys._getframe(1).f_locals["peer"]
def say(message):
    peer._writing.write((message if isinstance(message, str) else json.dumps(message)) + "\\n")
    peer._writing.flush()
def hear():
    line = peer._reading.readline()
    if not line: raise SystemExit
    return json.loads(line)
def pairs(**values): return {"kind": "dict", "value": [{"kind": "tuple", "value": [k, v]} for k, v in values.items()]}
def named(**values): say({"value": pairs(**{**{name: {"mine": 1} for name in NAMES}, **values})})
def serve(reply):
    while hear(): say({"changed": [None, None], **reply} if isinstance(reply, dict) else reply)
def true(*names): return pairs(**{name: {"mine": 2} for name in names})
hear()
""".replace("NAMES", repr(NAMES))

#: Programs that send messages which no honest program sends.
MESSAGES = {
    "makes a class": """
named()
hear()
arguments = {"kind": "tuple", "value": ["Z", {"kind": "tuple", "value": []}, true("__eq__")]}
say({"ask": "call", "arguments": [{"mine": 7, "exception": ["M", "type"]}, arguments, pairs()]})
say({"value": {"yours": 1}})
serve({"value": 5})
""",
    "makes a class from its own exception": """
named()
hear()
arguments = {"kind": "tuple", "value": []}
say({"ask": "call", "arguments": [{"mine": 7, "exception": ["M", "Exception"]}, arguments, pairs()]})
serve({"value": {"yours": 1}})
""",
    "returns a class with a metaclass": """
named()
serve({"value": {"mine": 7, "exception": ["M", "type", "object"]}})
""",
    "names a builtin": """
named()
serve({"value": {"builtin": "type"}})
""",
    "calls a builtin": """
named()
hear()
say({"ask": "call", "arguments": [{"builtin": "exit"}, {"kind": "tuple", "value": [0]}, pairs()]})
serve({"value": 5})
""",
    "calls an unknown function": """
named()
hear()
say({"ask": "call", "arguments": [{"yours": 0}, {"kind": "tuple", "value": []}, pairs()]})
serve({"value": 5})
""",
    "reads the tests": """
named()
hear()
say({"ask": "getattr", "arguments": [{"yours": 1}, "__globals__"]})
serve({"value": 5})
""",
    "replaces the builtins": """
named(__builtins__=true("abs", "all", "len", "isinstance", "type"))
serve({"value": True})
""",
    "replaces names of the tests": """
named(abs={"mine": 2}, all={"mine": 2}, math={"mine": 2}, __name__="x")
serve({"value": True})
""",
    "names that are no texts": """
say({"value": {"kind": "dict", "value": [{"kind": "tuple", "value": [1, {"mine": 1}]}]}})
serve({"value": 5})
""",
    "no names": """
say({"value": [1]})
serve({"value": 5})
""",
    "kind type": """
named()
serve({"value": {"kind": "type", "value": "x"}})
""",
    "kind module": """
named()
serve({"value": {"kind": "module", "value": "os"}})
""",
    "kind of an object": """
named()
serve({"value": {"kind": {"mine": 1}, "value": "x"}})
""",
    "number from a list": """
named()
serve({"value": {"kind": "Decimal", "value": [1]}})
""",
    "raw list": """
named()
serve({"value": [1, 2, 3]})
""",
    "raw object": """
named()
serve({"value": {}})
""",
    "unhashable key": """
named()
serve({"value": {"kind": "set", "value": [{"kind": "list", "value": []}]}})
""",
    "reference that is no number": """
named()
serve({"value": {"mine": [1]}})
""",
    "error without a name": """
named()
serve({"error": [], "text": "x"})
""",
    "error SystemExit": """
named()
serve({"error": ["SystemExit"], "text": "0"})
""",
    "error KeyboardInterrupt": """
named()
serve({"error": ["KeyboardInterrupt", "BaseException"], "text": ""})
""",
    "error StopIteration": """
named()
serve({"error": ["StopIteration", "Exception"], "text": ""})
""",
    "error with a base StopIteration": """
named()
serve({"error": ["X", "StopIteration"], "text": ""})
""",
    "error that is a function": """
named()
serve({"error": ["print"], "text": "passed: equality"})
""",
    "error that is no text": """
named()
serve({"error": [1, {}], "text": []})
""",
    "error with several bases": """
named()
serve({"error": ["A", "OSError", "SyntaxError", "KeyError"], "text": ""})
""",
    "no JSON": """
named()
serve('no JSON')
""",
    "empty lines": """
named()
serve('')
""",
    "a number": """
named()
serve('5')
""",
    "a text": """
named()
serve('"ask"')
""",
    "a list": """
named()
serve('["ask"]')
""",
    "deep brackets": """
named()
serve('[' * 100_000)
""",
    "deep value": """
named()
serve('{"value": ' + '{"kind": "list", "value": [' * 5000 + "]}" * 5000 + ", \\"changed\\": [null, null]}")
""",
    "digits": """
named()
serve('{"value": ' + '9' * 100_000 + '}')
""",
    "no value of changes": """
named()
serve('{"value": 5}')
""",
    "changes of another form": """
named()
serve({"value": 0, "changed": [5]})
""",
    "changes that are objects": """
named()
changed = {"kind": "tuple", "value": [{"kind": "list", "value": [{"mine": 4}]}]}
serve({"value": {"mine": 3}, "changed": [changed, {"mine": 4}]})
""",
    "answers in advance": """
named()
for _ in range(1000): say({"value": True, "changed": [None, None]})
serve({"value": 5})
""",
    "not a number": """
named()
serve('{"value": NaN, "changed": [null, null]}')
""",
    "length that is a text": """
named()
serve({"value": "x"})
""",
    "half a line": """
named()
peer._writing.write('{')
peer._writing.flush()
import os
os._exit(0)
""",
}
FEW = ["equality", "candidate", "zip", "map", "expected exception", "text"]


@pytest.mark.parametrize(
    "message",
    [pytest.param(name, marks=[] if name == "makes a class" else pytest.mark.slow) for name in MESSAGES],
)
async def test_no_message_of_a_program_passes_a_style(message: str) -> None:
    outcome = await run_tested(f"{_RAW}InvalidInput = None\n{MESSAGES[message]}", harness(FEW), LIMITS)
    assert "passed" not in outcome.stdout and not outcome.timed_out


EXPECTS_ERROR = "try:\n    solve(-1)\nexcept Exception:\n    pass\nelse:\n    raise AssertionError"


@pytest.mark.parametrize("body", ["import os; os._exit(0)", "raise SystemExit"])
def test_a_program_that_ends_has_not_raised_an_exception(body: str) -> None:
    ends, raises = judged([f"def solve(x): {body}", "def solve(x): raise ValueError"], EXPECTS_ERROR)
    assert (ends.reward, raises.reward) == (1.0 if "raise" in body else 0.0, 1.0)
