"""The calculator as a tool of a taskset: an MCP server, which verifiers starts by ``python -m calculator``."""

import operator
import re

import verifiers.v1 as vf

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    """A server with one tool, for each rollout."""

    TOOL_PREFIX = None

    @vf.tool
    def calculator(self, expression: str) -> str:
        """Compute with two whole numbers, as in 12*34."""
        match = re.fullmatch(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*", expression)
        if match is None:
            return "error: expected two numbers with +, - or * between them, as in 12*34"
        left, operation, right = match.groups()
        return str(OPERATIONS[operation](int(left), int(right)))


if __name__ == "__main__":
    Calculator.run()
