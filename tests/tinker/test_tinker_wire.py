"""The protobuf messages against the SDK's own generated ones: what it writes is read, what is written it reads."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from rollmill.tinker.wire import Sampled, pass_output, read_pass, sample_output

f32 = st.floats(width=32)


def request_of(data: list[tinker.Datum], loss_fn: str = "ppo", config: dict[str, float | str] | None = None) -> bytes:
    asked = tinker.types.ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config)  # type: ignore[arg-type]
    request = tinker.types.ForwardBackwardRequest(forward_backward_input=asked, model_id="m:train:0", seq_id=7)
    return forward_backward_request_to_proto(request).SerializeToString()


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), f32), max_size=40), st.integers(0, 3))
def test_data_written_by_the_sdk_are_read_bit_for_bit(rows: list[tuple[int, float]], num_more: int) -> None:
    tokens, values = [t for t, _ in rows], np.array([v for _, v in rows], np.float32)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": np.array(tokens, np.int64), "weights": values},  # type: ignore[dict-item]
    )
    found = read_pass(request_of([datum] * (1 + num_more)))
    assert (found.model_id, found.seq_id, len(found.data)) == ("m:train:0", 7, 1 + num_more)
    for read in found.data:
        assert read.tokens_N.tolist() == tokens
        assert read.inputs["target_tokens"].tolist() == tokens
        assert read.inputs["weights"].tobytes() == values.tobytes()


def test_settings_of_a_loss_come_as_numbers_and_texts() -> None:
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1]), loss_fn_inputs={})
    found = read_pass(request_of([datum], config={"clip_low_threshold": 0.75, "mode": "x"}))
    assert found.config == {"clip_low_threshold": 0.75, "mode": "x"}
    assert not found.is_forward_only


def test_chunks_are_joined_and_images_refused() -> None:
    chunks = [tinker.EncodedTextChunk(tokens=[1, 2]), tinker.EncodedTextChunk(tokens=[3])]
    datum = tinker.Datum(model_input=tinker.ModelInput(chunks=chunks), loss_fn_inputs={})  # type: ignore[arg-type]
    assert read_pass(request_of([datum])).data[0].tokens_N.tolist() == [1, 2, 3]
    message = pb.ForwardBackwardRequest(model_id="m")
    message.data.add().model_input.add().image.data = b"png"
    with pytest.raises(ValueError, match="text tokens only"):
        read_pass(message.SerializeToString())


def test_sparse_targets_are_written_out() -> None:
    message = pb.ForwardBackwardRequest(model_id="m")
    tensor = message.data.add().loss_fn_inputs["weights"]
    tensor.dtype = pb.DTYPE_FLOAT32
    tensor.shape.extend([3, 2])
    tensor.sparse_csr.values = np.array([5, 6, 7], np.float32).tobytes()
    tensor.sparse_csr.crow_indices = np.array([0, 1, 1, 3], np.int64).tobytes()
    tensor.sparse_csr.col_indices = np.array([1, 0, 1], np.int64).tobytes()
    assert read_pass(message.SerializeToString()).data[0].inputs["weights"].tolist() == [[0, 5], [0, 0], [6, 7]]
    tensor.sparse_csr.col_indices = np.array([1, 0, 2], np.int64).tobytes()
    with pytest.raises(ValueError, match="outside"):
        read_pass(message.SerializeToString())


@settings(derandomize=True, max_examples=80, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        read_pass(body)
    except ValueError:
        return


@settings(derandomize=True, max_examples=30, deadline=None)
@given(
    st.lists(st.lists(f32, max_size=5), min_size=1, max_size=6),
    st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False), max_size=3),
)
def test_output_of_a_pass_arrives_bit_for_bit(rows: list[list[float]], metrics: dict[str, float]) -> None:
    arrays = [np.array(row, np.float32) for row in rows]
    found = deserialize_forward_backward_output(pass_output({"logprobs": arrays}, len(arrays), metrics))
    assert found.metrics == metrics
    assert [np.asarray(o["logprobs"].data, np.float32).tobytes() for o in found.loss_fn_outputs] == [a.tobytes() for a in arrays]


def test_outputs_of_different_width_keep_their_shapes() -> None:
    arrays = [np.ones((2, 3), np.float32), np.ones((1, 3), np.float32), np.ones((4,), np.float32)]
    found = deserialize_forward_backward_output(pass_output({"logprobs": arrays}, 3, {}))
    assert [o["logprobs"].shape for o in found.loss_fn_outputs] == [[2, 3], [1, 3], [4]]


def test_samples_arrive_with_their_evidence() -> None:
    logprobs = np.array([-0.1, -2.5], np.float32)
    one = Sampled(tokens_T=np.array([3, 4]), logprobs_T=logprobs, is_stopped=True, tops=[[(3, -0.1), (9, -3.0)], [(1, -0.2), (4, -2.5)]])
    other = Sampled(tokens_T=np.array([5]), logprobs_T=logprobs[:1], is_stopped=False)
    found = deserialize_sample_response(sample_output([one, other], prompt_logprobs_T=np.array([np.nan, -1.0]), num_reused=1))
    assert [s.tokens for s in found.sequences] == [[3, 4], [5]]
    assert [s.stop_reason for s in found.sequences] == ["stop", "length"]
    assert found.sequences[0].logprobs_np is not None and found.sequences[0].logprobs_np.tobytes() == logprobs.tobytes()
    assert found.sequences[0].topk_logprobs is not None and [i for i, _ in found.sequences[0].topk_logprobs[1] or []] == [1, 4]
    assert found.prompt_logprobs == [None, -1.0]
    assert found.prompt_cache_hit_tokens == 1
