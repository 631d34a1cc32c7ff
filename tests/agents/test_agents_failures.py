"""What goes wrong around a foreign agent is a failure with its boundary, never a reward; what the agent does itself is graded."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from agent_stage import DEADLINE_S, FAMILY, SOLUTION, TASK, ScriptedPolicy, Stage, call, check_exact, stage, tiny_model, trained

from rollmill.gateway.front.model_call import Limits as FrontLimits
from rollmill.harness.program import Program
from rollmill.records import Boundary, RunFailure, StopReason
from rollmill.rollout.foreign import ProgramAgent, check_machine
from rollmill.sandbox.namespace import NamespaceBackend
from rollmill.sandbox.records import Capabilities

ASK = """
import json, os, sys, time, urllib.error, urllib.request
def ask(messages, base=None, key=None, model="gpt-4o", **more):
    body = json.dumps({"model": model, "messages": messages, "temperature": 0.3}).encode()
    headers = {"authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"]), "content-type": "application/json", **more}
    request = urllib.request.Request((base or os.environ["OPENAI_BASE_URL"]) + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
def user(text): return {"role": "user", "content": text}
def said(text): return {"role": "assistant", "content": text}
"""


def say(episode: str, turn: int) -> str:
    return f"answer {turn} in {episode}"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def policy(model_dir: Path) -> Iterator[ScriptedPolicy]:
    with ScriptedPolicy(model_dir, say) as made:
        yield made


def play(
    policy: ScriptedPolicy, code: str, scene: Callable[[Stage], Awaitable[None]], *, graded: tuple[int, ...] = (0,), **options: object
) -> None:
    program = Program(command=(sys.executable, "-c", ASK + code), graded_exit_codes=graded)
    if options.get("is_inside"):
        program = Program(command=("python3", "-c", ASK + code), graded_exit_codes=graded)

    async def whole() -> None:
        async with asyncio.timeout(DEADLINE_S), stage(policy, program, **options) as made:  # type: ignore[arg-type]
            await scene(made)
            assert len(made.gateway.episodes) == 0

    asyncio.run(whole())


def fails(policy: ScriptedPolicy, code: str, boundary: Boundary, words: str, **options: object) -> None:
    async def scene(made: Stage) -> None:
        with pytest.raises(RunFailure, match=words) as caught:
            await made.play("e")
        assert caught.value.boundary is boundary

    play(policy, code, scene, **options)


def test_agent_that_makes_no_model_call_is_a_failure_of_the_harness(policy: ScriptedPolicy) -> None:
    fails(policy, "print('no key found')", Boundary.HARNESS, r"made no model call.*no key found")


def test_agent_that_crashes_is_a_failure_with_its_last_words(policy: ScriptedPolicy) -> None:
    code = "ask([user('hi')]); raise SystemExit('cannot go on')"
    fails(policy, code, Boundary.HARNESS, r"ended with 1, graded are 0 .*cannot go on")

    async def scene(made: Stage) -> None:
        done = await made.play("e")
        assert (done.trace.stop, done.grade.reward) == (StopReason.EXITED, 0.0)

    play(policy, code, scene, graded=(0, 1))
    play(policy, code, scene, graded=())


def test_call_that_we_could_not_answer_fails_the_attempt_even_if_the_agent_ends_well(policy: ScriptedPolicy) -> None:
    policy.hold_after = 0
    code = "try: ask([user('hi')])\nexcept urllib.error.HTTPError as e: print('gave up', e.code)"
    fails(policy, code, Boundary.MODEL, "1 model calls of the agent could not be answered", front=FrontLimits(call_s=0.2))


def graded(policy: ScriptedPolicy, code: str, stop: StopReason, kind: str, **options: object) -> None:
    """An attempt that is graded although its agent got no answer to some call; `kind`: what that is counted as."""

    async def scene(made: Stage) -> None:
        done = await made.play("e")
        assert (done.trace.stop, done.grade.reward) == (stop, 1.0)
        assert made.runner.tally[kind] > 0 and made.runner.tally["failed"] == 0
        check_exact(done, policy, "e")

    play(policy, f"ask([user('hi')]); os.system({SOLUTION!r})\n{code}", scene, **options)


def test_agent_that_does_not_wait_for_an_answer_is_graded(policy: ScriptedPolicy) -> None:
    code = "try: ask([user('more')], **{'x-request-timeout-s': '0.000001'})\nexcept urllib.error.HTTPError as e: print(e.code)"
    graded(policy, code, StopReason.EXITED, "impatient")


def test_agent_that_asks_for_other_weights_gets_those_of_the_run(policy: ScriptedPolicy) -> None:
    code = "ask([user('more')], model='policy:99'); ask([user('and more')], model='policy@best')"
    graded(policy, code, StopReason.EXITED, "overridden")


def test_agent_that_crashes_on_a_body_that_is_too_large_is_graded(policy: ScriptedPolicy) -> None:
    code = "ask([user('x' * 100_000)])"
    graded(policy, code, StopReason.MAX_TOKENS, "oversized", front=FrontLimits(max_body_bytes=50_000))


FLOOD = """
import itertools, socket, urllib.parse
at = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
other = socket.create_connection((at.hostname, at.port))     # a call that never says what it wants
head = f"POST {at.path}/chat/completions HTTP/1.1\\r\\nhost: x\\r\\nauthorization: Bearer {os.environ['OPENAI_API_KEY']}\\r\\n"
other.sendall(head.encode() + b"content-length: 9\\r\\n\\r\\n")
for i in itertools.count(): ask([user(f"more {i}")])
"""


def test_agent_that_crashes_on_its_own_flood_is_graded(policy: ScriptedPolicy) -> None:
    graded(policy, FLOOD, StopReason.EXITED, "flooded", front=FrontLimits(max_running_per_episode=1))


def test_agent_at_the_deadline_is_cancelled_and_at_its_own_time_limit_graded(policy: ScriptedPolicy) -> None:
    code = f"ask([user('hi')]); os.system({SOLUTION!r}); time.sleep(1000)"

    async def late(made: Stage) -> None:
        with pytest.raises(TimeoutError, match="still running"):
            await made.play("e", within_s=0.5)

    async def stopped(made: Stage) -> None:
        done = await made.play("f")
        assert (done.trace.stop, done.grade.reward) == (StopReason.TIME_OUT, 1.0)
        check_exact(done, policy, "f")

    play(policy, code, late)
    play(policy, code, stopped, time_s=3.0)


def test_context_that_is_used_up_is_the_agents_own_doing(model_dir: Path) -> None:
    code = "text = ask([user('hi')])\nask([user('hi'), said(text), user('x ' * 5000)])"

    async def scene(made: Stage) -> None:
        done = await made.play("e")
        assert (done.trace.stop, done.grade.reward) == (StopReason.MAX_TOKENS, 0.0)
        check_exact(done, policy, "e")

    with ScriptedPolicy(model_dir, say, max_len=1024) as policy:
        play(policy, code, scene)


def test_nothing_is_sampled_after_the_end_and_no_key_opens_another_episode(policy: ScriptedPolicy) -> None:
    async def scene(made: Stage) -> None:
        first, second = (made.runner.open_session(key, seed=0, temperature=1.0, min_version=None) for key in ("a", "b"))
        await made.runner.run(TASK, "a", first, seed=0, deadline=time.monotonic() + DEADLINE_S)
        num = len(policy.requests)
        async with aiohttp.ClientSession() as http:
            for seat, key, status in ((first, first.endpoint.key, 410), (first, second.endpoint.key, 403), (first, "x", 401)):
                body = {"messages": [{"role": "user", "content": "more"}]}
                headers = {"authorization": f"Bearer {key}"}
                async with http.post(f"{seat.endpoint.openai_url}/chat/completions", json=body, headers=headers) as answer:
                    assert answer.status == status, await answer.text()
        assert len(policy.requests) == num
        assert made.runner.tally["overridden"] == 1, "the run's temperature is imposed"
        assert {r.temperature for r in policy.requests} == {1.0}

    play(policy, "ask([user('hi')])", scene)


AGENT_THAT_COMPACTS = """
first = ask([user("long story")])
second = ask([user("long story"), said(first), user("go on")])
summary = ask([user("long story"), said(first), user("go on"), said(second), user("sum up")])
ask([user("summary: " + summary), user("go on")])          # its history is replaced
helper = ask([{"role": "system", "content": "you are a helper"}, user("look it up")])
ask([user("long story"), said(first), user("another way")])    # a branch from the first answer
ask([user("long story"), said(first + " (edited)"), user("hm")])   # repeats an answer not quite as it was
"""


def test_compaction_helpers_and_branches_are_trained_once_each(policy: ScriptedPolicy) -> None:
    async def scene(made: Stage) -> None:
        done = await made.play("e")
        assert len(done.trace.windows) == 5 and len(policy.requests) == 7
        check_exact(done, policy, "e")
        assert made.runner.tally["forked"] >= 3
        assert len(trained(done.trace)) == done.trace.num_sampled

    play(policy, AGENT_THAT_COMPACTS, scene)


INSIDE = """
ask([user("hi")])
def status(base, key=None):
    try: return ask([user("hi")], base, key)
    except urllib.error.HTTPError as e: return e.code
    except OSError as e: return type(e).__name__
root = os.environ["OPENAI_BASE_URL"].split("/e/")[0]
found = [root, status(root + "/e/other/v1"), status(root + "/v1", "sk-guess"), status("http://169.254.169.254/v1"),
         status("http://metadata.internal/v1"), status("http://127.0.0.1:%PORT%/v1")]
open("found.json", "w").write(json.dumps(found))
print("bye")
"""


def test_agent_inside_a_box_reaches_its_own_episode_and_nothing_else(policy: ScriptedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := NamespaceBackend.probe()) is not None:
        pytest.skip(reason)
    seen: dict[str, str] = {}

    async def scene(made: Stage) -> None:
        family = made.runner._grader._family
        grade = family.grade

        async def look(task: object, attempt: object) -> object:
            seen.update(attempt.files)  # type: ignore[attr-defined]
            assert attempt.facts == {"exit_code": 0, "output": "bye\n"}  # type: ignore[attr-defined]
            return await grade(task, attempt)  # type: ignore[arg-type]

        monkeypatch.setattr(family, "grade", look)
        await made.play("e")

    play(policy, INSIDE.replace("%PORT%", str(policy.port)), scene, is_inside=True)
    root, other, guess, metadata, name, loopback = json.loads(seen["found.json"])
    assert (root, other, guess) == ("http://model.internal", 403, 401)
    assert metadata == 403 and name == "URLError" and loopback == "URLError", "no other host, and not our loopback"
    assert "task.json" not in seen


def test_sandbox_without_egress_or_shares_is_refused_with_the_way_out() -> None:
    able = Capabilities(backend="docker", isolation="container", fork=True)
    with pytest.raises(ValueError, match=r"'docker' does not.*rollout\.sandbox.*beside"):
        check_machine(able, site="")
    with pytest.raises(ValueError, match=r"agent\.image"):
        check_machine(Capabilities(backend="x", isolation="container", fork=True, egress=True), site="/s")
    check_machine(Capabilities(backend="x", isolation="container", fork=True, egress=True, shares=True), site="/s")


def test_family_with_a_machine_of_its_own_is_not_played_beside(policy: ScriptedPolicy) -> None:
    class WithMachine(type(FAMILY)):  # type: ignore[misc]
        def machine(self, task: object) -> None: ...

    with pytest.raises(ValueError, match=r"agent\.where"):
        ProgramAgent(Program(command=("x",)), WithMachine(), None, None, None, None, is_inside=False)  # type: ignore[arg-type]


def test_call_is_written_as_the_model_writes_it() -> None:
    assert call("ls") == '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
