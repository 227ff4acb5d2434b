"""How episodes are played: one reply (`RLVRWorkflow`; of prompts with pictures `VisionRLVRWorkflow`), several tries
(`MultiTurnWorkflow`), an agent with tools (`ToolWorkflow`), recorded conversations again (`TauReplayWorkflow`), or any
class with `async def run(engine, prompt) -> list[Trajectory]`."""

from datamodules.workflows.base import EpisodeEngine, Workflow, to_trajectory
from datamodules.workflows.multi_turn import MultiTurnWorkflow
from datamodules.workflows.response_template import ResponseTemplate
from datamodules.workflows.rlvr import RLVRWorkflow, VisionRLVRWorkflow
from datamodules.workflows.tau_replay import TauReplayWorkflow
from datamodules.workflows.tool_calls import ToolCall, hermes_calls, json_calls
from datamodules.workflows.tool_use import ToolWorkflow
from datamodules.workflows.tools import FunctionTools, Toolbox
from datamodules.workflows.turns import Turns

__all__ = [
    "EpisodeEngine",
    "FunctionTools",
    "MultiTurnWorkflow",
    "RLVRWorkflow",
    "ResponseTemplate",
    "TauReplayWorkflow",
    "ToolCall",
    "ToolWorkflow",
    "Toolbox",
    "Turns",
    "VisionRLVRWorkflow",
    "Workflow",
    "hermes_calls",
    "json_calls",
    "to_trajectory",
]
