"""The server over plain HTTP: repeated requests, results that are gone, keys, restarts, texts that end a sample, and odd bodies."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker_models import CONFIG, write_model
from tinker_worlds import adam, client_of, greedy, lesson, served

from rollmill.model import ModelConfig, Tokenizer
from rollmill.model.build import train_tokenizer
from rollmill.tinker.checkpoints import Checkpoints, parse_path
from rollmill.tinker.promises import Fault, Promises
from rollmill.tinker.run import check_reach
from rollmill.tinker.stopping import StopTexts
from rollmill.tinker.tenants import SeenNumbers

DEADLINE_S = 60.0
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tinker") / "tiny")


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(model, tmp_path_factory.mktemp("state"), num_engines=2) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{url}/api/v1", timeout=DEADLINE_S) as client:
        yield client


def post(http: httpx.Client, to: str, **body: Any) -> Any:
    reply = http.post(to, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def result(http: httpx.Client, request_id: str) -> httpx.Response:
    return http.post("retrieve_future", json={"request_id": request_id})


def new_model(http: httpx.Client) -> str:
    session = post(http, "create_session", tags=[], user_metadata=None, sdk_version="x")["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2, "seed": 1}}
    ids = {post(http, "create_model", **body)["request_id"] for _ in range(2)}
    assert len(ids) == 1
    return str(result(http, ids.pop()).json()["model_id"])


def test_repeated_request_is_done_once(http: httpx.Client) -> None:
    model_id = new_model(http)
    body = {"model_id": model_id, "seq_id": 1, "path": "only"}
    one, two = (post(http, "save_weights", **body)["request_id"] for _ in range(2))
    assert one == two
    # Done twice it would say that the name is taken.
    assert result(http, one).json() == result(http, two).json() == {"path": f"tinker://{model_id}/weights/only", "type": "save_weights"}
    sampler = post(http, "create_sampling_session", session_id=model_id.partition(":")[0], sampling_session_seq_id=0, base_model="tiny")
    ask = {"sampling_session_id": sampler["sampling_session_id"], "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
    replies = [post(http, "asample", **ask, sampling_params={"max_tokens": 4}) for _ in range(2)]
    assert replies[0] == replies[1]
    assert len({result(http, r["request_id"]).content for r in replies}) == 1


def test_unloaded_model_is_gone_and_so_are_its_requests(http: httpx.Client) -> None:
    model_id = new_model(http)
    assert result(http, post(http, "unload_model", model_id=model_id)["request_id"]).json()["model_id"] == model_id
    for path, body in (("optim_step", {"adam_params": {}}), ("get_info", {}), ("unload_model", {}), ("save_weights", {})):
        reply = http.post(path, json={"model_id": model_id, **body})
        assert reply.status_code == 404 and "no model" in reply.json()["detail"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("retrieve_future", {"request_id": "x"}, 410),
        ("session_heartbeat", {"session_id": "x"}, 410),
        ("create_model", {"session_id": "x", "model_seq_id": 0, "base_model": "tiny"}, 404),
        ("create_model", {"session_id": 3}, 400),
        ("asample", {"sampling_session_id": "x", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}}, 404),
        ("weights_info", {"tinker_path": "tinker://a:train:0/weights/../x"}, 400),
        ("weights_info", {"tinker_path": "tinker://../weights/x"}, 400),
        ("load_weights", {"path": "tinker://a:train:0/weights/x", "optimizer": False}, 400),
        ("nothing", {}, 404),
    ],
)
def test_what_names_nothing_is_an_http_error_with_a_reason(http: httpx.Client, path: str, body: dict[str, Any], status: int) -> None:
    reply = http.post(path, json=body)
    assert reply.status_code == status and reply.json()["detail"]


def test_bodies_that_are_no_request_are_refused(http: httpx.Client) -> None:
    for path in ("forward_backward", "optim_step", "asample"):
        reply = http.post(path, content=b"\xff\xfe{")
        assert reply.status_code in (400, 404) and reply.json()["detail"]
    assert http.post("cancel_future", json={"request_id": "x"}).status_code == 204
    assert http.get("checkpoints", params={"limit": "many"}).status_code == 400
    assert http.get("training_runs/a%2F..%2Fb/checkpoints").status_code in (400, 404)


def test_key_is_asked_for_where_one_is_set(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path, key="tml-secret") as url:
        with pytest.raises(tinker.AuthenticationError):
            client_of(url, "tml-other").get_server_capabilities()
        assert client_of(url, "tml-secret").get_server_capabilities().supported_models
        assert httpx.get(f"{url}/api/v1/healthz").json() == {"status": "ok"}


def test_verb_serves_until_it_is_interrupted(model: Path, tmp_path: Path) -> None:
    code = "import typer; from rollmill.tinker.commands import tinker_command; typer.run(tinker_command)"
    args = [sys.executable, "-u", "-c", code, str(model), "--port", "0", "--state", str(tmp_path), "--name", "mine", "--num-threads", "1"]
    with subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+:\d+", line)
        assert found, line + process.stderr.read()
        told = httpx.get(f"{found[0]}/api/v1/get_server_capabilities").json()
        assert told["supported_models"][0]["model_name"] == "mine"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode in (0, 130, -signal.SIGINT), errors
    assert "Traceback" not in errors


def test_server_beyond_this_machine_needs_a_key() -> None:
    check_reach("127.0.0.1", None)
    check_reach("localhost", None)
    check_reach("0.0.0.0", "tml-x")
    for host in ("0.0.0.0", "example.org"):
        with pytest.raises(ValueError, match="no key is set"):
            check_reach(host, None)
    with pytest.raises(ValueError, match="must start with 'tml-'"):
        check_reach("127.0.0.1", "secret")


def test_saved_state_and_sampler_survive_a_restart(model: Path, tmp_path: Path) -> None:
    prompt = types.ModelInput.from_ints([1, 2, 3])
    with served(model, tmp_path) as url:
        training = client_of(url).create_lora_training_client("tiny", rank=4, seed=0)
        training.forward_backward([lesson([1, 2, 3, 4])], "cross_entropy")
        training.optim_step(adam()).result()
        state, sampler = training.save_state("s").result().path, training.save_weights_for_sampler("w").result().path
        said = training.create_sampling_client(sampler).compute_logprobs(prompt).result()
        expected = training.forward_backward([lesson([1, 2, 3, 4])], "cross_entropy").result().metrics
    with served(model, tmp_path) as url:
        client = client_of(url)
        assert client.create_sampling_client(model_path=sampler).compute_logprobs(prompt).result() == said
        again = client.create_training_client_from_state_with_optimizer(state)
        assert again.forward_backward([lesson([1, 2, 3, 4])], "cross_entropy").result().metrics == expected
        run = tinker.RestClient(base_url=url, api_key="tml-local").get_training_run(training.model_id).result()
        assert run.lora_rank == 4
    other = write_model(tmp_path / "tiny", ModelConfig(**{f: getattr(CONFIG, f) for f in CONFIG.__struct_fields__} | {"max_position": 64}))
    (other / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-2] + b"\x01\x3c")
    with served(other, tmp_path) as url, pytest.raises(tinker.RequestFailedError, match="trained on other weights"):
        client_of(url).create_training_client_from_state(state)


def test_adapter_of_a_checkpoint_is_a_peft_directory(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path) as url:
        training = client_of(url).create_lora_training_client("tiny", rank=4, seed=0)
        _, kind, name = parse_path(training.save_weights_for_sampler("w").result().path)
    (folder,) = tmp_path.glob(f"*/{kind}/{name}")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 32.0, str(model))
    assert (folder / "adapter_model.safetensors").is_file() and not (folder / "optimizer.safetensors").exists()


def test_texts_end_a_sample(tmp_path: Path) -> None:
    path = tmp_path / "talking"
    train_tokenizer(["abc abc"], 300, path)
    tokenizer = Tokenizer(path)
    fields = {f: getattr(CONFIG, f) for f in CONFIG.__struct_fields__} | {"vocab_size": 304}
    write_model(path, ModelConfig(**fields))
    text = "one two. three"
    with served(path, tmp_path / "state") as url:
        training = client_of(url).create_lora_training_client("talking", rank=8, seed=0)
        ids = tokenizer.encode(text)
        for _ in range(25):
            training.forward_backward([lesson([7, *ids])], "cross_entropy")
            training.optim_step(adam())
        sampler = training.save_weights_and_get_sampling_client()
        for stop, said in (("two.", "one two."), (["zzz", "w"], "one tw"), ([], text)):
            params = types.SamplingParams(max_tokens=len(ids), temperature=0.0, stop=stop)
            (sequence,) = sampler.sample(types.ModelInput.from_ints([7]), 1, params).result().sequences
            assert tokenizer.decode(sequence.tokens) == said
            assert sequence.stop_reason == ("stop" if stop else "length")
            assert sequence.logprobs is not None and len(sequence.logprobs) == len(sequence.tokens)
        # The SDK loads the tokenizer from the model's directory.
        assert training.get_tokenizer().decode(ids) == text


class ByteTokens:
    """A tokenizer whose tokens are bytes."""

    def __init__(self) -> None:
        self.token_bytes = {i: bytes([i]) for i in range(256)}


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("ab.é"), max_size=12), st.integers(1, 4))
def test_stop_text_is_found_where_it_is_complete_however_the_tokens_come(chars: list[str], step: int) -> None:
    tokens = list("".join(chars).encode())
    stops = StopTexts(ByteTokens(), ["b.", "é"])  # type: ignore[arg-type]
    found = None
    for end in range(step, len(tokens) + step, step):
        found = stops.cut(tokens[:end])
    ends = [k for k in range(1, len(tokens) + 1) if any(t.encode() in bytes(tokens[:k]) for t in ("b.", "é"))]
    assert found == (ends[0] if ends else None)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=30))
def test_number_is_new_exactly_once_in_any_order(numbers: list[int]) -> None:
    seen = SeenNumbers()
    assert [seen.add(n) for n in numbers] == [n not in numbers[:i] for i, n in enumerate(numbers)]


async def settled_promises() -> None:
    promises = Promises(max_kept=2)
    made = [promises.make(str(i)) for i in range(3)]
    made[0].keep({"a": 1})
    made[0].break_off("too late", Fault.SERVER)
    made[1].break_off("wrong", Fault.USER)
    assert await made[0].settled(0.0) and json.loads(made[0].body) == {"a": 1}
    assert json.loads(made[1].body) == {"error": "wrong", "category": "user"}
    assert not await made[2].settled(0.0)
    made[2].keep(b"x")
    for promise in made:
        promises.retire(promise)
    assert [promises.get(str(i)) for i in range(3)] == [None, made[1], made[2]]
    assert promises.num_open == 0


def test_promises_settle_once_and_the_oldest_results_go() -> None:
    asyncio.run(settled_promises())


def test_expired_checkpoint_is_gone(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path) as url:
        training = client_of(url).create_lora_training_client("tiny", rank=1, seed=0)
        path = training.save_weights_for_sampler("w", ttl_seconds=60).result().path
        for ttl in (0, -5):
            with pytest.raises(tinker.RequestFailedError, match="ttl_seconds"):
                training.save_weights_for_sampler(f"ttl{ttl}", ttl_seconds=ttl).result()
    checkpoints, now = Checkpoints(tmp_path), datetime.now(UTC)
    assert [f.path for f, _ in checkpoints.list(now=now)] == [path]
    with pytest.raises(ValueError, match="expired"):
        checkpoints.facts(path, now=now + timedelta(seconds=61))
    assert checkpoints.list(now=now) == []


def test_many_samplers_share_the_engines_without_mixing(url: str) -> None:
    client = client_of(url)
    samplers, expected = [], []
    prompt = types.ModelInput.from_ints([1, 2, 3])
    for seed in range(4):
        training = client.create_lora_training_client("tiny", rank=2, seed=seed)
        training.forward_backward([lesson([1, 2, 3, 4 + seed])], "cross_entropy")
        training.optim_step(adam(0.05)).result()
        data = training.forward([lesson([1, 2, 3])], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
        expected.append(np.asarray(data, np.float32).tolist())
        samplers.append(training.save_weights_and_get_sampling_client())
    asked = [(i, samplers[i].compute_logprobs(prompt)) for _ in range(5) for i in range(4)]
    running = [samplers[i].sample(prompt, 3, greedy(20)) for i in range(4)]
    assert all(future.result()[1:] == expected[i] for i, future in asked)
    assert len({tuple(f.result().sequences[0].tokens) for f in running}) > 1
    client.close("success").result()
