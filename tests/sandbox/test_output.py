"""Head and tail of any stream, however it is cut into chunks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmill.sandbox.agent.plain.output import HeadTail


@given(st.lists(st.binary(max_size=700), max_size=12), st.integers(0, 1500))
def test_head_and_tail_are_bounded_true_and_independent_of_the_chunks(chunks, limit):
    whole = b"".join(chunks)
    kept, at_once = HeadTail(limit), HeadTail(limit)
    for chunk in chunks:
        kept.feed(chunk)
    at_once.feed(whole)
    shown = kept.render()
    assert shown == at_once.render() and kept.num_bytes == len(whole) and len(shown) <= limit
    if len(whole) <= limit:
        assert shown == whole
    elif limit >= 256:
        head, _, rest = shown.partition(b"\n[... ")
        number, _, tail = rest.partition(b" bytes left out ...]\n")
        assert whole.startswith(shown[: (limit - 63) // 2]) and whole.endswith(shown[len(shown) - (limit - 64) // 2 :])
        if whole.count(b"[...") == 0:
            assert len(head) + int(number) + len(tail) == len(whole)
