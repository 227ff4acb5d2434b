"""The calculator's agent as a LangGraph graph: a node that asks the model, and one that carries out its calls."""

from __future__ import annotations

import json
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from examples.agents.plain_openai.agent import calculated


@tool
def calculate(expression: str) -> str:
    """The value of an expression of whole numbers with +, - and *."""
    return calculated(json.dumps({"expression": expression}))


async def solve(task: Any) -> str:
    """Runs the graph on `task.text`; what the model says last is the answer, and none where it never ends."""
    model = ChatOpenAI(model="policy").bind_tools([calculate])  # finds OPENAI_BASE_URL and OPENAI_API_KEY

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([calculate], handle_tool_errors=True))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    try:
        state = await graph.compile().ainvoke({"messages": [("user", task.text)]}, {"recursion_limit": 12})
    except GraphRecursionError:  # an agent that raises costs its group; this is a wrong answer
        return ""
    return str(state["messages"][-1].content)
