"""The door for agents as they are: an HTTP server that speaks their protocols and records their calls as training
sequences. See `docs/agents.md`."""

from datamodules.workflows.adapters.ray_executor import RayExecutor
from datamodules.workflows.gateway.agents import Processes
from datamodules.workflows.gateway.server import Gateway
from datamodules.workflows.gateway.sessions import Budget, Session
from datamodules.workflows.gateway.workflow import AgentWorkflow

__all__ = ["AgentWorkflow", "Budget", "Gateway", "Processes", "RayExecutor", "Session"]
