"""A plain agent on the `openai` package: asks for the next command, runs it, tells the result, until the model only answers.

It knows nothing of training: the client finds its model at OPENAI_BASE_URL, as it would in production.
"""

import json
import os
import subprocess
import sys

from openai import OpenAI

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a shell command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
MAX_TURNS = 20


def run(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout + done.stderr)[-4000:] or "(no output)"


def main(instruction: str) -> None:
    client = OpenAI()
    messages = [{"role": "system", "content": "You are a coding agent."}, {"role": "user", "content": instruction}]
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=[BASH])
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            print(said.content)
            return
        for call in said.tool_calls:
            try:
                result = run(json.loads(call.function.arguments)["command"])
            except (ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


main(sys.argv[1])
