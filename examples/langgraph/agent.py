"""A LangGraph agent: a graph of a model and its tools. It knows nothing of training."""

import operator
import re

from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode, tools_condition

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@tool
def calculator(expression: str) -> str:
    """Compute with two whole numbers.

    Args:
        expression: two numbers with +, - or * between them, as in 12*34.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*", expression)
    if match is None:
        return "error: expected two numbers with +, - or * between them, as in 12*34"
    left, operation, right = match.groups()
    return str(OPERATIONS[operation](int(left), int(right)))


def build(model: BaseChatModel) -> CompiledStateGraph:
    """The graph: the model answers or calls tools, whose results go back to it."""
    bound = model.bind_tools([calculator])

    async def ask(state: MessagesState) -> dict[str, list]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


async def answer(model: BaseChatModel, question: str) -> str:
    """What the agent says in the end."""
    state = await build(model).ainvoke({"messages": [{"role": "user", "content": question}]}, {"recursion_limit": 10})
    return state["messages"][-1].text
