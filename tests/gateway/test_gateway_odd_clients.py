"""Clients repeat answers in the shapes their wire format gives them, and change them on the way: what was sampled is trained all the same,
each token once, in one window."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from live_gateway import LiveGateway
from stub_replica import StubReplica, logprob_of

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
HTTP = httpx.Client(timeout=30)
FUNCTION = {"name": "bash", "description": "d", "parameters": PARAMETERS}


def call(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


ANSWERS = {
    "text": "I look at it.\n",
    "nothing": "",
    "white space": "  \n ",
    "calls alone": call("a") + call("b"),
    "text around calls": f"before\n{call('a')}\nbetween\n{call('b')}\nafter",
    "line ends and accents": "one\r\ne\u0301te\u0301\r\ntwo",
    "a call of accents": call("echo e\u0301 \u4f60"),
}


class Script:
    """What the policy says next."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, request: object) -> str:
        return self.lines.pop(0)


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def replica(script: Script) -> Iterator[StubReplica]:
    with StubReplica(script, piece_size=3) as made:  # type: ignore[arg-type]
        yield made


@pytest.fixture(scope="module")
def live(replica: StubReplica) -> Iterator[LiveGateway]:
    with LiveGateway(lambda: [replica.url]) as made:
        yield made


class Wire:
    """One client and one episode."""

    def __init__(self, live: LiveGateway, episode: str) -> None:
        self._root = f"{live.url.removesuffix('/v1')}/e/{episode}/v1"
        self.chat_url, self.messages_url, self.responses_url = (f"{self._root}/{p}" for p in ("chat/completions", "messages", "responses"))

    def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = HTTP.post(url, json={"model": "x", **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def by_chat(wire: Wire, retell: Callable[[str], str]) -> None:
    """Null for no text, and what is absent left out."""
    ask: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    tools = [{"type": "function", "function": FUNCTION}]
    said = wire.post(wire.chat_url, {"messages": ask, "tools": tools})["choices"][0]["message"]
    calls = said.get("tool_calls")
    again = {"role": "assistant", "content": retell(said["content"] or "") or None} | ({"tool_calls": calls} if calls else {})
    results = [{"role": "tool", "tool_call_id": c["id"], "content": [{"type": "text", "text": "ok"}]} for c in calls or ()]
    wire.post(wire.chat_url, {"messages": [*ask, again, *results, {"role": "user", "content": "on"}], "tools": tools})


def by_messages(wire: Wire, retell: Callable[[str], str]) -> None:
    """All results in one user message, with text behind them; blocks without text dropped."""
    ask: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    rest = {"tools": [{"name": "bash", "description": "d", "input_schema": PARAMETERS}], "max_tokens": 200}
    said = wire.post(wire.messages_url, {"messages": ask, **rest})["content"]
    again = [{**b, "text": retell(b["text"])} if b["type"] == "text" else b for b in said if b.get("text") != ""]
    results = [{"type": "tool_result", "tool_use_id": b["id"], "content": "ok"} for b in said if b["type"] == "tool_use"]
    last = {"role": "user", "content": [*results, {"type": "text", "text": "on"}]}
    wire.post(wire.messages_url, {"messages": [*ask, {"role": "assistant", "content": again}, last], **rest})


def by_responses(wire: Wire, retell: Callable[[str], str], *, has_ids: bool = True) -> None:
    tools = [{"type": "function", **FUNCTION}]
    said = wire.post(wire.responses_url, {"input": "go", "tools": tools, "store": False})["output"]
    for item in said:
        for part in item.get("content") or ():
            part["text"] = retell(part["text"])
        if not has_ids:
            del item["id"]
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "made up by the client"}]}
    results = [{"type": "function_call_output", "call_id": i["call_id"], "output": "ok"} for i in said if i["type"] == "function_call"]
    last = {"role": "user", "content": "on"}
    wire.post(wire.responses_url, {"input": [{"role": "user", "content": "go"}, thought, *said, *results, last], "tools": tools})


def by_responses_without_ids(wire: Wire, retell: Callable[[str], str]) -> None:
    by_responses(wire, retell, has_ids=False)


def by_previous_response(wire: Wire, retell: Callable[[str], str]) -> None:
    tools = [{"type": "function", **FUNCTION}]
    first = wire.post(wire.responses_url, {"input": "go", "tools": tools})
    calls = [i for i in first["output"] if i["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": c["call_id"], "output": "ok"} for c in calls]
    body = {"input": [*results, {"role": "user", "content": "on"}], "previous_response_id": first["id"], "tools": tools}
    wire.post(wire.responses_url, body)


CLIENTS = [by_chat, by_messages, by_responses, by_responses_without_ids, by_previous_response]
RETELLINGS: dict[str, Callable[[str], str]] = {
    "as it was": lambda text: text,
    "composed": lambda text: unicodedata.normalize("NFC", text),
    "line ends": lambda text: text.replace("\r\n", "\n"),
    "stripped": str.strip,
}


@pytest.mark.parametrize("client", CLIENTS)
def test_answer_of_any_shape_is_gone_on_from_token_by_token(
    client: Callable[[Wire, Callable[[str], str]], None], script: Script, replica: StubReplica, live: LiveGateway
) -> None:
    for answer in ANSWERS:
        for retelling, retell in RETELLINGS.items():
            episode = f"{client.__name__}.{answer}.{retelling}".replace(" ", "-")
            script.lines = [ANSWERS[answer], "done"]
            client(Wire(live, episode), retell)
            windows = live.episode(episode).windows()
            said = [i for s in replica.sampled if s.request.session == episode for i in s.token_ids]
            assert len(windows) == 1, f"{episode}: {live.episode(episode).tally}"
            mask = windows[0].sampled_T != 0
            trained = list(zip(windows[0].tokens_T[mask].tolist(), windows[0].logprobs_T[mask].tolist(), strict=True))
            assert trained == [(i, logprob_of(i)) for i in said] and live.episode(episode).untrained() == Counter()


def test_retry_of_one_choice_keeps_the_one_that_was_taken(script: Script, live: LiveGateway) -> None:
    wire, ask = Wire(live, "choices"), [{"role": "user", "content": "go"}]
    script.lines = ["a one", "a two", "a three", "more"]
    choices = wire.post(wire.chat_url, {"messages": ask, "n": 3})["choices"]
    second = choices[1]["message"]["content"]
    wire.post(wire.chat_url, {"messages": [*ask, {"role": "assistant", "content": second}, {"role": "user", "content": "on"}]})
    episode = live.episode("choices")
    (window,) = episode.windows()
    trained = episode.chat.tokenizer.decode(window.tokens_T[window.sampled_T != 0].tolist())
    assert trained == f"{second}<|im_end|>more<|im_end|>"
    assert episode.tally["orphaned"] == 2 and set(episode.untrained()) == {"orphaned"}
