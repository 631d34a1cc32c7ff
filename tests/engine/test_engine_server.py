"""Claims about the server on a real port: the native client, hostile input, back-pressure."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
from engine_worlds import CONFIG, DEADLINE_S, Server, packed_logprobs, tiny_model, wait_until, write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmill.engine.client import EngineClient, EngineRejected, EngineUnavailable, VersionUnmet
from rollmill.engine.protocol import MSGPACK, FinishReason, GenerateReply, GenerateRequest, Health, ScoreReply, ScoreRequest
from rollmill.engine.run import run_engine
from rollmill.weights import Publisher, open_store


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    server = Server(write_model(tmp_path_factory.mktemp("model") / "tiny"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def http():
    with httpx.Client(timeout=DEADLINE_S) as client:
        yield client


def ask(**fields) -> GenerateRequest:
    return GenerateRequest(**{"prompt_ids": [1, 2, 3], "max_tokens": 12, "seed": 4, **fields})


def native(url: str, *requests: GenerateRequest) -> list[GenerateReply]:
    async def main() -> list[GenerateReply]:
        async with EngineClient(url, timeout_s=DEADLINE_S) as client:
            return await asyncio.gather(*(client.generate(r) for r in requests))

    return asyncio.run(main())


def test_native_client_gets_exact_logprobs_and_versions(server: Server) -> None:
    replies = native(server.url, *(ask(seed=i) for i in range(20)))
    model = tiny_model()
    for reply in replies:
        assert len(reply.token_ids) == 12 and reply.versions_T.tolist() == [0] * 12
        assert np.array_equal(reply.logprobs_T, packed_logprobs(model, [1, 2, 3], reply.token_ids).numpy())


def test_score_gives_the_bits_that_were_sampled_in_either_encoding(server: Server) -> None:
    async def both() -> tuple[GenerateReply, ScoreReply]:
        async with EngineClient(server.url) as client:
            reply = await client.generate(ask(temperature=0.8))
            tokens = [1, 2, 3, *reply.token_ids]
            return reply, await client.score(ScoreRequest(token_ids=tokens, start=3, temperature=0.8, exact_version=0))

    reply, scored = asyncio.run(both())
    assert scored.logprobs == reply.logprobs and (scored.version, scored.start) == (0, 3)
    body = {"token_ids": [1, 2, 3, *reply.token_ids], "start": 3, "temperature": 0.8}
    assert base64.b64decode(httpx.post(server.url + "/v1/score", json=body).json()["logprobs"]) == reply.logprobs
    for odd, why in (({"start": 0}, "start is 0"), ({"token_ids": [5]}, "start is 1 of 1 tokens"), ({"token_ids": [5, 999]}, "999")):
        refused = httpx.post(server.url + "/v1/score", json={**body, "start": 1, **odd})
        assert refused.status_code == 400 and why in refused.text
    assert httpx.post(server.url + "/v1/score", json={**body, "exact_version": 3}).status_code == 409


def test_json_and_msgpack_carry_the_same_bits(server: Server) -> None:
    (packed,) = native(server.url, ask())
    response = httpx.post(server.url + "/v1/generate", json={"prompt_ids": [1, 2, 3], "max_tokens": 12, "seed": 4})
    body = response.json()
    assert base64.b64decode(body["logprobs"]) == packed.logprobs
    assert body["token_ids"] == packed.token_ids and body["spans"] == [[0, 12, 0]] and body["finish_reason"] == "length"
    assert response.headers["x-policy-version"] == "0"


def test_an_unmet_version_is_a_409_that_names_the_served_one(server: Server) -> None:
    with pytest.raises(VersionUnmet, match="needs at least 5") as caught:
        native(server.url, ask(min_version=5))
    assert caught.value.version == 0
    body = httpx.post(server.url + "/v1/generate", json={"prompt_ids": [1], "max_tokens": 1, "exact_version": 9})
    assert body.status_code == 409 and body.json()["retryable"] is True and body.json()["version"] == 0


def test_client_tells_its_own_mistakes_from_an_engine_that_is_away(server: Server) -> None:
    with pytest.raises(EngineRejected, match="max_tokens is 0"):
        native(server.url, ask(max_tokens=0))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(EngineUnavailable, match="no answer"):
            native(f"http://127.0.0.1:{closed.getsockname()[1]}", ask())


def test_health_pressure_models_and_metrics_answer(server: Server) -> None:
    async def main():
        async with EngineClient(server.url) as client:
            return await client.health(), await client.pressure()

    native(server.url, ask())
    health, pressure = asyncio.run(main())
    assert health.phase == "serving" and len(health.fingerprint) == 32 and (pressure.slots, pressure.max_len) == (8, CONFIG.max_position)
    assert httpx.get(server.url + "/v1/models").json()["data"][0]["id"] == "tiny"
    metrics = httpx.get(server.url + "/metrics").text
    for name in ("engine_swap_pause_s_count 0.0", 'engine_finished_requests_total{reason="deadline"} 0.0', "engine_sampled_tokens_total"):
        assert name in metrics


PATHS = ["/v1/generate", "/v1/stream", "/v1/score"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt_ids": "x"}',
        b"[" * 200000,
        b'{"prompt_ids": [1], "max_tokens": 1, "constraint": {"kind": "regex", "text": "\\ud800"}}',
        b'{"prompt_ids": [1], "max_tokens": 1, "constraint": {"kind": "regex"}}',
        b'{"prompt_ids": [1], "max_tokens": 1, "constraint": {"kind": "yaml", "text": "a"}}',
        b'{"prompt_ids": [1e400]}',
        b'{"prompt_ids": [1], "max_tokens": 99999999999999999999}',
    ],
)
def test_malformed_bodies_are_refused_with_400(server: Server, path: str, body: bytes) -> None:
    response = httpx.post(server.url + path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"] and response.headers["x-policy-version"] == "0"


def test_other_content_types_methods_and_sizes_are_refused(server: Server) -> None:
    assert httpx.post(server.url + "/v1/generate", content=b"x", headers={"content-type": "text/csv"}).status_code == 400
    assert httpx.post(server.url + "/v1/generate", content=b"\xc1garbage", headers={"content-type": MSGPACK}).status_code == 400
    assert httpx.get(server.url + "/v1/generate").status_code == 405
    assert httpx.get(server.url + "/nowhere").json()["error"]["code"] == 404
    assert httpx.post(server.url + "/v1/stream", content=b" " * (9 * 2**20)).status_code == 413

    def endless():
        for _ in range(20):
            yield b" " * 2**19

    assert httpx.post(server.url + "/v1/stream", content=endless()).status_code == 413


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
known_fields = ["prompt_ids", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop_ids", "session", "queue", "min_version"]
known_fields += ["exact_version", "deadline_s", "routes_from", "num_top", "constraint", "constraint_from", "token_ids", "start"]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(PATHS), data=st.data())
def test_arbitrary_json_never_gives_a_500(server: Server, http: httpx.Client, path: str, data: st.DataObject) -> None:
    valid = {"token_ids": [1, 2]} if path == "/v1/score" else {"prompt_ids": [1], "max_tokens": 2}
    odd = data.draw(st.dictionaries(st.sampled_from(known_fields), json_values, min_size=1, max_size=2))
    body = {**valid, **odd}
    if isinstance(body.get("max_tokens"), int) and body["max_tokens"] > 50:
        body["max_tokens"] = 50
    response = http.post(server.url + path, content=json.dumps(body).encode())
    assert response.status_code in (200, 400, 409), (body, response.text)


def test_a_client_that_leaves_frees_its_row(server: Server) -> None:
    def running() -> int:
        return httpx.get(server.url + "/v1/pressure").json()["running"]

    async def leave() -> None:
        async with EngineClient(server.url) as client:
            task = asyncio.create_task(client.generate(ask(max_tokens=250)))
            while (await client.pressure()).running == 0 and not task.done():
                pass
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(leave(), DEADLINE_S))
    wait_until(lambda: running() == 0, "the cancelled request's row is free")


def test_a_full_queue_answers_503_with_retry_after(tmp_path: Path) -> None:
    server = Server(write_model(tmp_path / "tiny"), num_slots=1, max_waiting=2)
    try:

        async def main() -> list[GenerateReply | BaseException]:
            async with EngineClient(server.url, timeout_s=DEADLINE_S) as client:
                return await asyncio.gather(*(client.generate(ask(max_tokens=100)) for _ in range(40)), return_exceptions=True)

        results = asyncio.run(main())
        served = [r for r in results if isinstance(r, GenerateReply)]
        refused = [r for r in results if isinstance(r, EngineUnavailable)]
        assert len(served) + len(refused) == 40 and len(served) >= 3 and refused
        assert all(r.retry_after_s == 1 and "wait already" in str(r) for r in refused)
        assert all(r.finish_reason is FinishReason.LENGTH for r in served)
    finally:
        server.close()


def test_a_server_with_a_store_is_unhealthy_until_the_first_version_then_serves_it(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    server = Server(write_model(tmp_path / "tiny"), store=store)
    try:
        response = httpx.get(server.url + "/health")
        assert response.status_code == 503 and msgspec.json.decode(response.content, type=Health).phase == "starting"
        assert response.headers["x-policy-version"] == "-1"
        with pytest.raises(EngineUnavailable, match="starting"):
            native(server.url, ask())
        with Publisher(store, run_id="t") as publisher:
            version = publisher.submit(tiny_model(5).serving_tensors(), step=0)
            publisher.flush(DEADLINE_S)
        wait_until(lambda: httpx.get(server.url + "/health").status_code == 200, "the server is healthy")
        (reply,) = native(server.url, ask())
        assert reply.versions_T.tolist() == [version] * 12
        np.testing.assert_allclose(reply.logprobs_T, packed_logprobs(tiny_model(5), [1, 2, 3], reply.token_ids).numpy(), atol=1e-4)
    finally:
        server.close()


def test_a_port_in_use_is_refused_with_its_number(server: Server, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"port {server.port} on 127.0.0.1 is in use; .* another port"):
        asyncio.run(run_engine(tmp_path, port=server.port))


def test_a_directory_without_a_model_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model at"):
        asyncio.run(run_engine(tmp_path))


def test_a_failed_engine_ends_its_process_and_says_why(tmp_path: Path) -> None:
    """A real process whose model fails in the middle of a step."""
    path = write_model(tmp_path / "tiny")
    code = f"""
import asyncio, pathlib, threading, httpx
from rollmill.engine.run import run_engine
from rollmill.model import Model
real, calls = Model.forward, []
def broken(self, *args):
    # The first forward is the engine's own, before it serves.
    calls.append(1)
    if len(calls) > 1:
        raise RuntimeError("out of memory, say")
    return real(self, *args)
Model.forward = broken
def ready(port):
    url, body = f"http://127.0.0.1:{{port}}/v1/generate", {{"prompt_ids": [1], "max_tokens": 4}}
    threading.Thread(target=lambda: print("status", httpx.post(url, json=body).status_code, flush=True)).start()
asyncio.run(run_engine(pathlib.Path({str(path)!r}), on_ready=ready))
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, capture_output=True, text=True)
    assert done.returncode == 1 and "status 503" in done.stdout
    assert "the engine stopped serving: the engine's loop crashed" in done.stderr


def test_a_model_without_a_tokenizer_takes_ids_and_no_constraints(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny")
    (path / "tokenizer.json").unlink()
    server = Server(path)
    try:
        constraint = {"kind": "regex", "text": "a"}
        body = {"prompt_ids": [1], "max_tokens": 2, "stop_ids": [256], "constraint": constraint}
        response = httpx.post(server.url + "/v1/generate", json=body)
        assert response.status_code == 400 and "no tokenizer.json" in response.text
        assert len(native(server.url, ask())[0].token_ids) == 12
    finally:
        server.close()


def test_protocol_and_client_import_without_torch() -> None:
    code = "import sys, rollmill.engine.protocol, rollmill.engine.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S).returncode == 0


def test_a_tiny_config_is_what_the_tests_think_it_is() -> None:
    assert CONFIG.num_heads // CONFIG.num_kv_heads == 2, "grouped-query attention is exercised"
