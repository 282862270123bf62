"""The math agent of AgentScope Tuner's quick start, on this platform: the import of ``tune`` and the paths changed.

MODEL and DATASET in the environment name a model folder (or a Hugging Face name) and a folder with train.jsonl, whose
rows have the columns question and answer.
"""

# ruff: noqa: UP006, UP035 (as its authors wrote it)
import os
from typing import Dict

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.model import OpenAIChatModel

from rft_platform.tuner import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune


async def run_react_agent(
    task: Dict,
    model: OpenAIChatModel,
    auxiliary_models: Dict[str, OpenAIChatModel],
) -> WorkflowOutput:
    agent = ReActAgent(
        name="react_agent",
        sys_prompt="你是一个乐于助人的数学题解答智能体。",
        model=model,
        formatter=OpenAIChatFormatter(),
    )

    response = await agent.reply(
        msg=Msg("user", task["question"], role="user"),  # 从 task 提取问题
    )

    return WorkflowOutput(
        response=response,
    )


async def judge_function(task: Dict, response: Msg, auxiliary_models: Dict[str, OpenAIChatModel]) -> JudgeOutput:
    """简单奖励:如果回复中包含标准答案则为 1.0 否则为 0.0。"""
    ground_truth = task["answer"]
    reward = 1.0 if ground_truth in response.get_text_content() else 0.0
    return JudgeOutput(reward=reward)


if __name__ == "__main__":
    dataset = DatasetConfig(path=os.environ.get("DATASET", "my_dataset"), split="train")
    model = TunerModelConfig(model_path=os.environ.get("MODEL", "Qwen/Qwen3-0.6B"), max_model_len=16384)
    algorithm = AlgorithmConfig(
        algorithm_type="multi_step_grpo",
        group_size=8,
        batch_size=32,
        learning_rate=1e-6,
    )
    tune(
        workflow_func=run_react_agent,
        judge_func=judge_function,
        model=model,
        train_dataset=dataset,
        algorithm=algorithm,
    )
