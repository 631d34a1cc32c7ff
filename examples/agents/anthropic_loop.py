"""The same plain agent on the `anthropic` package, streaming: the client finds its model at ANTHROPIC_BASE_URL."""

import os
import subprocess
import sys

from anthropic import Anthropic

BASH = {
    "name": "bash",
    "description": "Run a shell command",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
MAX_TURNS = 20


def run(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout + done.stderr)[-4000:] or "(no output)"


def main(instruction: str) -> None:
    client = Anthropic()
    messages = [{"role": "user", "content": instruction}]
    for _ in range(MAX_TURNS):
        options = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 1024, "system": "You are a coding agent.", "tools": [BASH]}
        with client.messages.stream(messages=messages, **options) as stream:
            answer = stream.get_final_message()
        messages.append({"role": "assistant", "content": answer.content})
        results = []
        for block in answer.content:
            if block.type == "tool_use":
                try:
                    text = run(block.input["command"])
                except (KeyError, TypeError, subprocess.TimeoutExpired) as error:
                    text = f"error: {error}"
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": text})
        if not results:
            print("".join(block.text for block in answer.content if block.type == "text"))
            return
        messages.append({"role": "user", "content": results})


main(sys.argv[1])
