"""The published SDK against a server of ours: supervised learning, RL, samplers, checkpoints, several models, and what goes wrong."""

from __future__ import annotations

import asyncio
import importlib.util
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types
from tinker_models import CONFIG, write_model
from tinker_worlds import adam, client_of, greedy, lesson, logprobs_of, sampled_lesson, served

ROOT = Path(__file__).parents[2]
SENTENCE = [1, 2, 3, 4, 5, 6, 7, 8]
Client = tinker.ServiceClient


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tinker") / "tiny")


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(model, tmp_path_factory.mktemp("state")) as url:
        yield url


@pytest.fixture
def service(url: str) -> Iterator[Client]:
    client = client_of(url)
    yield client
    client.close("success").result()


def taught(training: tinker.TrainingClient, num_steps: int, tokens: list[int] = SENTENCE) -> list[float]:
    """The losses of a few supervised steps."""
    losses = []
    for _ in range(num_steps):
        passed = training.forward_backward([lesson(tokens)], "cross_entropy")
        stepped = training.optim_step(adam())
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def test_server_says_what_it_has(service: Client, model: Path) -> None:
    (found,) = service.get_server_capabilities().supported_models
    assert (found.model_name, found.max_context_length) == (str(model), CONFIG.max_position)
    assert found.trainable and found.sampleable


def test_supervised_loop_lowers_the_loss_and_the_sampler_says_what_was_taught(service: Client, model: Path) -> None:
    training = service.create_lora_training_client("tiny", rank=8, seed=0)
    losses = taught(training, 15)
    assert losses[-1] < 0.2 * losses[0]
    sampler = training.save_weights_and_get_sampling_client()
    (sequence,) = sampler.sample(types.ModelInput.from_ints([1]), 1, greedy(7)).result().sequences
    assert sequence.tokens == SENTENCE[1:]


def test_all_weights_are_trained_when_the_rank_is_0(service: Client) -> None:
    training = service.create_lora_training_client("tiny", rank=0)
    assert training.get_info().is_lora is False
    losses = []
    for _ in range(8):
        passed, stepped = training.forward_backward([lesson(SENTENCE)], "cross_entropy"), training.optim_step(adam(3e-3))
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    assert losses[-1] < 0.5 * losses[0]
    sampler = training.save_weights_and_get_sampling_client()
    sequence = sampler.sample(types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=6)).result().sequences[0]
    scored = training.forward([lesson([1, 2, *sequence.tokens])], "cross_entropy").result()
    assert logprobs_of(scored)[0][1:].tolist() == sequence.logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_sampled_logprobs_are_the_trainers_bit_for_bit(service: Client, temperature: float) -> None:
    training = service.create_lora_training_client("tiny", rank=8, seed=1)
    taught(training, 5)
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=12, temperature=temperature, seed=5, stop=[])
    response = sampler.sample(types.ModelInput.from_ints([1, 2]), 3, params).result()
    data = [lesson([1, 2, *s.tokens]) for s in response.sequences]
    found = logprobs_of(training.forward(data, "cross_entropy").result())
    assert [x[1:].tolist() for x in found] == [s.logprobs for s in response.sequences]
    # And the third way to the same numbers: scoring what was sampled as a prompt.
    scored = sampler.compute_logprobs(types.ModelInput.from_ints([1, 2, *response.sequences[0].tokens])).result()
    assert scored[0] is None and scored[2:] == response.sequences[0].logprobs


def test_importance_sampling_on_policy_has_ratio_one(service: Client) -> None:
    training = service.create_lora_training_client("tiny", rank=8, seed=1)
    sampler = training.save_weights_and_get_sampling_client()
    sequence = sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=5, stop=[])).result().sequences[0]
    assert sequence.logprobs is not None
    data = [sampled_lesson([1], sequence.tokens, sequence.logprobs, 1.0)]
    # Exactly -1 for each of the five tokens: the logprobs are the same bits, so every ratio is exp(0).
    assert training.forward(data, "importance_sampling").result().metrics["loss:sum"] == -5.0
    assert training.forward(data, "ppo").result().metrics["loss:sum"] == -5.0
    for name in ("cispo", "dro"):
        found = training.forward(data, name).result().metrics["loss:sum"]
        assert found == pytest.approx(-float(np.sum(sequence.logprobs)), rel=1e-5)


def test_rl_loop_of_the_example_raises_the_reward(url: str) -> None:
    spec = importlib.util.spec_from_file_location("tinker_loop", ROOT / "examples" / "tinker_loop.py")
    assert spec is not None and spec.loader is not None
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    curve = loop.main([url, "tiny", "--num-steps", "15"])
    assert np.mean(curve[:2]) < 0.2
    assert np.mean(curve[-2:]) > 0.7


def test_resumed_run_goes_on_exactly_as_the_first(service: Client) -> None:
    first = service.create_lora_training_client("tiny", rank=4, seed=3)
    taught(first, 3)
    path = first.save_state("third").result().path
    second = service.create_training_client_from_state_with_optimizer(path)
    # One after the other in turns, so that each step also takes the live weights from the other run.
    on, again = zip(*((taught(first, 1), taught(second, 1)) for _ in range(4)), strict=True)
    assert on == again
    weights_only = service.create_training_client_from_state(path)
    assert taught(weights_only, 1) == list(on[0])
    assert taught(weights_only, 1) != list(on[1])


def test_run_of_all_weights_is_resumed_exactly(service: Client) -> None:
    first = service.create_lora_training_client("tiny", rank=0)
    taught(first, 2)
    second = service.create_training_client_from_state_with_optimizer(first.save_state("full").result().path)
    assert taught(first, 3) == taught(second, 3)
    path = first.save_weights_for_sampler("full").result().path
    sampler = first.create_sampling_client(path)
    assert sampler.sample(types.ModelInput.from_ints([1]), 1, greedy(3)).result().sequences[0].tokens


def test_two_models_and_the_base_model_do_not_disturb_each_other(service: Client) -> None:
    alone = service.create_lora_training_client("tiny", rank=4, seed=1)
    expected = taught(alone, 4)
    one, two = (service.create_lora_training_client("tiny", rank=4, seed=1) for _ in range(2))
    base = service.create_sampling_client(base_model="tiny")
    before = base.compute_logprobs(types.ModelInput.from_ints(SENTENCE)).result()
    found, other = [], []
    for _ in range(4):
        found += taught(one, 1)
        other += taught(two, 1, [9, 9, 8, 8, 7, 7])
    assert found == expected and other != expected
    samplers = [one.save_weights_and_get_sampling_client(), two.save_weights_and_get_sampling_client()]
    assert base.compute_logprobs(types.ModelInput.from_ints(SENTENCE)).result() == before
    # All of them at once: each sample comes from its own weights only.
    asked = [[s.compute_logprobs(types.ModelInput.from_ints(SENTENCE)) for s in [*samplers, base]] for _ in range(6)]
    rounds = [[f.result() for f in row] for row in asked]
    assert all(row == rounds[0] for row in rounds)
    assert rounds[0][2] == before and rounds[0][0] != rounds[0][1]


def test_requests_of_a_model_are_done_in_order_without_waiting_for_results(service: Client) -> None:
    waited = service.create_lora_training_client("tiny", rank=4, seed=2)
    expected = taught(waited, 5)
    training = service.create_lora_training_client("tiny", rank=4, seed=2)
    passes = []
    for _ in range(5):
        passes.append(training.forward_backward([lesson(SENTENCE)], "cross_entropy"))
        training.optim_step(adam())
    assert [p.result().metrics["loss:sum"] for p in passes] == expected


def test_gradients_of_several_passes_add_up_to_those_of_one(service: Client) -> None:
    data = [lesson([3, 1, 4, 1, 5]), lesson([2, 7, 1, 8])]
    norms = []
    for split in (False, True):
        training = service.create_lora_training_client("tiny", rank=4, seed=2)
        for batch in [data[:1], data[1:]] if split else [data]:
            training.forward_backward(batch, "cross_entropy").result()
        metrics = training.optim_step(adam()).result().metrics
        assert metrics is not None and metrics["is_applied"] == 1.0
        norms.append(metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_custom_loss_of_the_client_is_the_built_in_one(service: Client) -> None:
    def cross_entropy(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        return -sum(x.sum() for x in logprobs), {"mine": 1.0}

    built_in = service.create_lora_training_client("tiny", rank=4, seed=2)
    own = service.create_lora_training_client("tiny", rank=4, seed=2)
    expected = built_in.forward_backward([lesson(SENTENCE)], "cross_entropy").result()
    found = own.forward_backward_custom([lesson(SENTENCE)], cross_entropy).result()
    assert found.metrics["mine"] == 1.0
    assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    built_in.optim_step(adam()).result()
    own.optim_step(adam()).result()
    assert taught(own, 1) == taught(built_in, 1)


def test_targets_may_be_several_per_position(service: Client) -> None:
    training = service.create_lora_training_client("tiny", rank=4, seed=2)
    inputs: Any = {"target_tokens": np.array([[2, 3], [3, 4], [4, 5]]), "weights": np.array([[1, 0.5]] * 3, np.float32)}
    wide = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
    found = training.forward([wide, lesson([1, 2, 3, 4])], "cross_entropy").result()
    assert found.loss_fn_outputs[0]["logprobs"].shape == [3, 2]
    assert np.reshape(found.loss_fn_outputs[0]["logprobs"].data, (3, 2))[:, 0].tolist() == logprobs_of(found)[1].tolist()


def test_samples_stop_where_they_are_told(service: Client) -> None:
    training = service.create_lora_training_client("tiny", rank=8, seed=0)
    taught(training, 20, [1, 2, 3, 0, 5, 6])
    sampler = training.save_weights_and_get_sampling_client()

    def said(stop: Any) -> tuple[list[int], str]:
        params = types.SamplingParams(max_tokens=5, temperature=0.0, stop=stop)
        (sequence,) = sampler.sample(types.ModelInput.from_ints([1]), 1, params).result().sequences
        return sequence.tokens, sequence.stop_reason

    assert said(None) == ([2, 3, 0], "stop")
    assert said([]) == ([2, 3, 0, 5, 6], "length")
    assert said([3]) == ([2, 3], "stop")


def test_equal_seeds_give_equal_samples_and_the_samples_of_one_request_differ(service: Client) -> None:
    sampler = service.create_sampling_client(base_model="tiny")
    params = types.SamplingParams(max_tokens=8, seed=11, stop=[])
    one, two = (sampler.sample(types.ModelInput.from_ints([1, 2]), 4, params).result() for _ in range(2))
    assert [s.tokens for s in one.sequences] == [s.tokens for s in two.sequences]
    assert len({tuple(s.tokens) for s in one.sequences}) == 4
    assert len({s.sequence_id for s in [*one.sequences, *two.sequences]}) == 8


def test_alternatives_and_parts_of_a_prompt_are_scored_when_asked_for(service: Client) -> None:
    sampler = service.create_sampling_client(base_model="tiny")
    prompt = types.ModelInput.from_ints(SENTENCE)
    response = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2, stop=[]), True, topk_sample_logprobs=3).result()
    (sequence,) = response.sequences
    assert sequence.topk_logprobs is not None and [len(row or []) for row in sequence.topk_logprobs] == [3, 3]
    assert response.prompt_logprobs is not None and response.prompt_logprobs[0] is None
    assert sampler.compute_logprobs(prompt, 2).result() == [None] * 6 + response.prompt_logprobs[6:]
    # A prompt that fills the context leaves no room to sample, and is scored all the same.
    assert len(sampler.compute_logprobs(types.ModelInput.from_ints([1] * CONFIG.max_position)).result()) == CONFIG.max_position


def test_sampler_in_another_process_is_the_same_sampler(service: Client) -> None:
    sampler = service.create_sampling_client(base_model="tiny")
    again = pickle.loads(pickle.dumps(sampler))
    prompt = types.ModelInput.from_ints(SENTENCE)
    assert again.compute_logprobs(prompt).result() == sampler.compute_logprobs(prompt).result()
    assert again._cloned_sampler_id == 1
    assert sampler.get_base_model().endswith("tiny")


def test_cancelled_sample_ends_and_others_go_on(service: Client) -> None:
    sampler = service.create_sampling_client(base_model="tiny")
    prompt, long = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=120, stop=[])

    async def abandoned() -> None:
        tasks = [asyncio.create_task(sampler.sample_async(prompt, 8, long)) for _ in range(4)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True))

    asyncio.run(abandoned())
    assert len(sampler.sample(prompt, 1, greedy(3)).result().sequences[0].tokens) == 3


def test_only_the_newest_unnamed_samplers_are_kept(service: Client) -> None:
    training = service.create_lora_training_client("tiny", rank=1, seed=2)
    samplers = [training.save_weights_and_get_sampling_client() for _ in range(9)]
    assert samplers[1].sample(types.ModelInput.from_ints([1]), 1, greedy(1)).result()
    with pytest.raises(tinker.NotFoundError, match="newest 8"):
        samplers[0].sample(types.ModelInput.from_ints([1]), 1, greedy(1)).result()


def test_checkpoints_are_listed_changed_and_deleted(service: Client, url: str) -> None:
    training = service.create_lora_training_client("tiny", rank=4, seed=2, train_unembed=False)
    taught(training, 1)
    state = training.save_state("a", user_metadata={"note": "x"}).result().path
    sampler_path = training.save_weights_for_sampler("b", ttl_seconds=3600).result().path
    rest = tinker.RestClient(base_url=url, api_key="tml-local")
    found = {c.tinker_path: c for c in rest.list_checkpoints(training.model_id).result().checkpoints}
    assert {p: c.checkpoint_type for p, c in found.items()} == {state: "training", sampler_path: "sampler"}
    assert found[state].user_metadata == {"note": "x"} and found[state].expires_at is None
    assert found[sampler_path].expires_at is not None and (found[sampler_path].size_bytes or 0) > 1000
    assert state in {c.tinker_path for c in rest.list_user_checkpoints(limit=1000).result().checkpoints}
    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.is_lora, info.lora_rank, info.train_unembed) == (True, 4, False)
    run = rest.get_training_run(training.model_id).result()
    assert run.last_checkpoint is not None and run.last_checkpoint.tinker_path == state
    assert training.model_id in {r.training_run_id for r in rest.list_training_runs(limit=1000).result().training_runs}
    rest.set_checkpoint_ttl_from_tinker_path(state, 7200).result()
    rest.publish_checkpoint_from_tinker_path(state).result()
    changed = {c.tinker_path: c for c in rest.list_checkpoints(training.model_id).result().checkpoints}[state]
    assert changed.expires_at is not None and changed.public
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert [c.tinker_path for c in rest.list_checkpoints(training.model_id).result().checkpoints] == [sampler_path]
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        rest.delete_checkpoint_from_tinker_path(state).result()


def test_name_is_taken_until_it_is_overwritten(service: Client) -> None:
    training = service.create_lora_training_client("tiny", rank=1)
    training.save_state("same").result()
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        training.save_state("same").result()
    assert training.save_state("same", overwrite=True).result().path.endswith("/weights/same")
    with pytest.raises(tinker.RequestFailedError, match="cannot name a checkpoint"):
        training.save_state("../same").result()


def bad_data() -> list[tuple[str, types.Datum, str]]:
    """(loss, datum, what the message says)."""
    text = types.ModelInput.from_ints([1, 2])

    def datum(**inputs: Any) -> types.Datum:
        return types.Datum(model_input=text, loss_fn_inputs=inputs)

    one = np.ones(2, np.float32)
    return [
        ("cross_entropy", datum(), "no loss_fn_inputs"),
        ("cross_entropy", datum(target_tokens=np.array([1])), "one for every token"),
        ("cross_entropy", datum(target_tokens=np.array([1, 99])), "from 0 to 31"),
        ("cross_entropy", datum(target_tokens=np.array([1, 2]), weights=one[:1]), "weights of shape"),
        ("ppo", datum(target_tokens=np.array([1, 2]), logprobs=one), "lacks loss_fn_inputs\\['advantages'\\]"),
        ("ppo", datum(target_tokens=np.array([1, 2]), logprobs=one, advantages=one, weights=one), "this loss takes"),
        ("gspo", datum(target_tokens=np.array([1, 2])), "this server has cross_entropy"),
    ]


@pytest.mark.parametrize(("loss", "datum", "message"), bad_data(), ids=lambda v: v if isinstance(v, str) else "")
def test_bad_data_fail_as_the_users_and_leave_the_model_as_it_was(service: Client, loss: Any, datum: types.Datum, message: str) -> None:
    training = service.create_lora_training_client("tiny", rank=1, seed=2)
    with pytest.raises(tinker.RequestFailedError, match=message) as failed:
        training.forward_backward([datum], loss).result()
    assert failed.value.category is types.RequestErrorCategory.User
    # The order goes on: the next request of the model is done.
    metrics = training.optim_step(adam()).result().metrics
    assert metrics is not None and metrics["is_applied"] == 0.0


def test_other_mistakes_are_told_with_what_to_change(service: Client) -> None:
    with pytest.raises(tinker.RequestFailedError, match="this server has"):
        service.create_lora_training_client("somebody/else", rank=1)
    with pytest.raises(tinker.BadRequestError, match="no checkpoint"):
        service.create_sampling_client(model_path="tinker://a:train:0/sampler_weights/x")
    with pytest.raises(tinker.RequestFailedError, match="no checkpoint"):
        service.create_training_client_from_state("tinker://a:train:0/weights/x")
    training = service.create_lora_training_client("tiny", rank=1)
    with pytest.raises(tinker.RequestFailedError, match="learning_rate"):
        training.optim_step(adam(-1.0)).result()
    with pytest.raises(tinker.RequestFailedError, match="clip"):
        training.forward_backward([sampled_lesson([1, 2], [3], [0.0], 1.0)], "ppo", {"clip": 1.0}).result()
    sampler = service.create_sampling_client(base_model="tiny")
    for prompt, params, message in (
        ([], types.SamplingParams(max_tokens=1), "prompt_ids is empty"),
        ([99], types.SamplingParams(max_tokens=1), "from 0 to 31"),
        ([1] * 128, types.SamplingParams(max_tokens=1), "shorten it"),
        ([1], types.SamplingParams(max_tokens=0), "max_tokens"),
        ([1], types.SamplingParams(max_tokens=1, temperature=-1.0), "temperature"),
        ([1], types.SamplingParams(max_tokens=1, stop="x"), "no tokenizer.json"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=message):
            sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result()


def test_ended_session_lets_its_models_go(url: str) -> None:
    client = client_of(url)
    training = client.create_lora_training_client("tiny", rank=1)
    path = training.save_state("kept").result().path
    client.close("success").result()
    other = client_of(url)
    rest = tinker.RestClient(base_url=url, api_key="tml-local")
    with pytest.raises(tinker.NotFoundError):
        rest.get_session(training.holder.get_session_id()).result()
    # What was saved outlives it.
    assert taught(other.create_training_client_from_state(path), 1)
    other.close("success").result()
