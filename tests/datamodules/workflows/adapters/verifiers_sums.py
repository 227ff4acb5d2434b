"""A taskset of the package `verifiers` for tests: sums, for which there is a tool."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    answer: str


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)


class SumsTask(vf.Task[SumsData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward()
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumsTask]:
        for a in range(3):
            yield SumsTask(SumsData(prompt=f"{a}+1?", answer=str(a + 1)), self.config.task)


if __name__ == "__main__":
    Calculator.run()
