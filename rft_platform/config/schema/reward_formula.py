"""The reward as a formula over the metrics of feedback: numbers, names, ``+``, ``-``, ``*``, ``/`` and parentheses."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

REWARD = "reward"  #: the metric that trains unless a formula names others; it is always declared
_LONGEST = 500  # characters
_LARGEST = 1e9
_BINARY: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_UNARY: Mapping[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


@dataclass(frozen=True, slots=True)
class RewardFormula:
    """A formula that ``parse`` has checked."""

    text: str
    names: frozenset[str]  # of its metrics
    tree: ast.expr = field(compare=False)

    @classmethod
    def parse(cls, text: str) -> "RewardFormula":
        """Raises ValueError for a text that is no formula; nothing of it is executed."""
        if len(text) > _LONGEST:
            raise ValueError(f"the formula has {len(text)} characters: expected at most {_LONGEST}")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            _check(tree)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"{text!r} is no formula: expected one as in 0.7*solved + 0.3*helpful") from error
        names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        if not names:
            raise ValueError(f"{text!r} names no metric: expected a formula as in 0.7*solved + 0.3*helpful")
        return cls(text, names, tree)

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """The reward; None if a metric is missing or the result is not finite (a division by zero)."""
        if not self.names <= metrics.keys():
            return None
        try:
            result = _value(self.tree, metrics)
        except (ZeroDivisionError, OverflowError):
            return None
        return result if math.isfinite(result) else None


def _check(node: ast.AST) -> None:
    match node:
        case ast.BinOp(left, operation, right) if type(operation) in _BINARY:
            _check(left)
            _check(right)
        case ast.UnaryOp(operation, operand) if type(operation) in _UNARY:
            _check(operand)
        case ast.Name():
            pass
        case ast.Constant(int() | float() as value) if not isinstance(value, bool) and value <= _LARGEST:
            pass
        case _:
            raise ValueError(
                f"{ast.unparse(node)!r} is not allowed in a formula: expected numbers of at most 1e9, names of "
                "metrics, + - * / and parentheses"
            )


def _value(node: ast.AST, metrics: Mapping[str, float]) -> float:
    match node:
        case ast.BinOp(left, operation, right):
            return _BINARY[type(operation)](_value(left, metrics), _value(right, metrics))
        case ast.UnaryOp(operation, operand):
            return _UNARY[type(operation)](_value(operand, metrics))
        case ast.Name(name):
            return metrics[name]
        case ast.Constant(value):
            return float(value)  # type: ignore[arg-type]
    raise AssertionError(node)  # parse has checked the tree


#: The reward of feedback as it is.
PLAIN = RewardFormula.parse(REWARD)
