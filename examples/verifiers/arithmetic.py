"""A taskset in verifiers' own API: calculations, with a calculator as a tool if wanted."""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf
from calculator import OPERATIONS, Calculator

__all__ = ["Arithmetic"]


class CalculationData(vf.TaskData):
    """What a task consists of, besides its prompt."""

    answer: int


class CalculationConfig(vf.TaskConfig):
    """``calculator``: whether the model has the tool."""

    calculator: bool = False


class Calculation(vf.Task[CalculationData, vf.State, CalculationConfig]):
    """One calculation: the answer must be the right number; a short answer is a little better."""

    @classmethod
    def toolsets(cls, config: CalculationConfig) -> list[vf.Toolset]:
        """The calculator, if it is wanted."""
        return [Calculator(vf.ToolsetConfig())] if config.calculator else []

    @vf.reward(weight=1.0)
    async def right(self, task: CalculationData, trace: vf.Trace) -> float:
        """1 if the last number of the answer is right."""
        numbers = re.findall(r"-?\d+", trace.last_reply)
        return float(bool(numbers) and int(numbers[-1]) == task.answer)

    @vf.reward(weight=0.1)
    async def short(self, trace: vf.Trace) -> float:
        """1 for an answer of 10 characters, 0 for 50 and more; an untrained model can learn this."""
        return min(1.0, max(0.0, (50 - len(trace.last_reply)) / 40))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        """Length of the answer."""
        return float(len(trace.last_reply))


class ArithmeticConfig(vf.TasksetConfig):
    """How many calculations, and of which seed."""

    task: CalculationConfig = CalculationConfig()
    size: int = 48
    seed: int = 0


class Arithmetic(vf.Taskset[Calculation, ArithmeticConfig]):
    """``size`` calculations that ``seed`` decides."""

    def load(self) -> Iterator[Calculation]:
        """The calculations in order."""
        draw = random.Random(self.config.seed)
        for _ in range(self.config.size):
            left, sign, right = draw.randint(2, 20), draw.choice(list(OPERATIONS)), draw.randint(2, 20)
            answer = OPERATIONS[sign](left, right)
            data = CalculationData(prompt=f"What is {left}{sign}{right}?", answer=answer)
            yield Calculation(data, self.config.task)
