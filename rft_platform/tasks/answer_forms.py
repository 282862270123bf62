"""Forms of the answers that the scorers of nine datasets of reasoning-gym evaluate as Python.

Only an answer of one of these forms may reach such a scorer: its evaluation computes numbers and lists, calls nothing
but mathematical functions, and reads no attribute. The text of an answer is parsed here, and never evaluated.
"""

import ast
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

_LONGEST = 10_000  # characters
_ARITHMETIC = re.compile(r"[\d+\-*/(). \n]+")
_EXPRESSION = re.compile(r"[A-Za-z\d+\-*/(). \n]+")
_DRAWN = re.compile(r"[Q_\s]+")
_FUNCTIONS = frozenset(
    (
        "sin",
        "cos",
        "tan",
        "sec",
        "csc",
        "cot",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "exp",
        "log",
        "ln",
        "sqrt",
    )
)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)


def is_scorable(dataset: str, answer: str) -> bool:
    """Whether the scorer of ``dataset`` may get ``answer``, which is not the task's own answer."""
    form = _FORMS.get(dataset)
    if form is None:
        return True
    try:
        return len(answer) <= _LONGEST and form(answer)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _arithmetic(answer: str) -> bool:
    """Numbers, + - * / ** and parentheses."""
    return _ARITHMETIC.fullmatch(answer) is not None and _is_expression(ast.parse(answer.strip(), mode="eval").body)


def _expression(answer: str) -> bool:
    """Arithmetic with ``pi``, symbols of one letter and mathematical functions of one argument."""
    return _EXPRESSION.fullmatch(answer) is not None and _is_expression(ast.parse(answer.strip(), mode="eval").body)


def _is_expression(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return type(value) in (int, float)
        case ast.Name(id=name):
            return len(name) == 1 or name == "pi"
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _is_expression(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            return isinstance(operator, _OPERATORS) and _is_expression(left) and _is_expression(right)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
            return name in _FUNCTIONS and _is_expression(argument)
    return False


def _list(answer: str) -> bool:
    """A list of whole numbers and texts, or a list of such lists."""
    value = ast.literal_eval(answer.strip())
    if not isinstance(value, list):
        return False
    rows = [row for row in value if isinstance(row, list)]
    items = [item for item in value if not isinstance(item, list)] + [item for row in rows for item in row]
    return all(type(item) in (int, str) for item in items)


def _board(answer: str) -> bool:
    """A drawn board, whose text names nothing, or a board as a list."""
    return _DRAWN.fullmatch(answer) is not None or _list(answer)


#: The form of an answer by dataset; the other datasets compare answers without evaluating them.
_FORMS: Mapping[str, Callable[[str], bool]] = MappingProxyType(
    {
        **dict.fromkeys(("countdown", "puzzle24"), _arithmetic),
        **dict.fromkeys(("simple_integration", "intermediate_integration", "polynomial_multiplication"), _expression),
        **dict.fromkeys(("binary_matrix", "spiral_matrix", "string_insertion"), _list),
        "n_queens": _board,
    }
)
