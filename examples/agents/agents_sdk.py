"""An agent on the OpenAI Agents SDK: its own loop, its own tool calls; the model is found at OPENAI_BASE_URL, by the Responses API."""

import asyncio
import subprocess
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def bash(command: str) -> str:
    """Run a shell command."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout + done.stderr)[-4000:] or "(no output)"


async def main(instruction: str) -> None:
    agent = Agent(name="coder", instructions="You are a coding agent.", tools=[bash])
    result = await Runner.run(agent, instruction, max_turns=20)
    print(result.final_output)


asyncio.run(main(sys.argv[1]))
