"""An agent in one file without any package: HTTP to the model at OPENAI_BASE_URL, four tools on files, and nothing else.

It asks the way the demo model was taught, so that `rollmill train examples/agents/plain_http.toml` trains it as it is: the program runs
inside the box of every attempt and does not know that it is being trained.
"""

import http.client
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

SYSTEM = "You are a coding agent. Use the tools, then submit."
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
MAX_TURNS = 5


def ask(messages: list[dict]) -> str:
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    model = http.client.HTTPConnection(url.hostname, url.port, timeout=120)
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    model.request("POST", url.path + "/chat/completions", json.dumps({"model": "any", "messages": messages}), headers)
    reply = model.getresponse()
    body = json.loads(reply.read())
    if reply.status != 200:
        sys.exit(f"the model answered {reply.status}: {body}")
    return body["choices"][0]["message"]["content"] or ""


def use(name: str, path: str = "", command: str = "", content: str = "", old: str = "", new: str = "") -> str:
    """What a tool did, in the words the model knows."""
    if name == "bash":
        done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=10, check=False)
        text = done.stdout.decode("utf-8", "replace")
        return f"{text}[exit {done.returncode}]" if done.returncode else text or "(no output)"
    file = Path(path)
    if name == "read":
        return file.read_text()
    if name == "edit":
        text = file.read_text()
        if text.count(old) != 1:
            return f"error: old text {'not found' if old not in text else f'found {text.count(old)} times'} in {path}"
        content = text.replace(old, new)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return "ok"


def main(instruction: str) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]
    for turn in range(MAX_TURNS):
        answer = ask(messages)
        messages.append({"role": "assistant", "content": answer})
        calls = CALL.findall(answer)
        try:
            parsed = [json.loads(call) for call in calls]
            if not parsed or any(call["name"] == "submit" for call in parsed):
                return
            results = [use(call["name"], **call["arguments"]) for call in parsed]
        except (ValueError, KeyError, TypeError, OSError, subprocess.TimeoutExpired):
            return
        messages += [{"role": "tool", "tool_call_id": f"call-{turn}-{i}", "content": text} for i, text in enumerate(results)]


main(sys.argv[1])
