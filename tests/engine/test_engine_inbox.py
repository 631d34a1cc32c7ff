"""Claims about the inbox: what is let in is handed out once and stays open until it has ended, and nothing gets in once it is shut."""

from __future__ import annotations

import threading

import pytest
from engine_worlds import DEADLINE_S

from rollmill.engine.inbox import Inbox, Offer, QueueFull
from rollmill.engine.protocol import GenerateRequest
from rollmill.engine.scheduler import Sequence
from rollmill.weights import Fingerprint


def seq(key: int) -> Sequence:
    request = GenerateRequest(prompt_ids=[1], max_tokens=1)
    return Sequence(key=key, request=request, seed=0, arrived_at=0.0, on_update=lambda s, u: None, streams=False)


def never() -> Fingerprint:
    raise AssertionError("nobody took it")


def test_a_request_counts_against_the_bound_until_it_has_ended() -> None:
    inbox, (a, b, c) = Inbox(max_open=2), map(seq, range(3))
    assert inbox.put(a) and inbox.put(b)
    assert inbox.take(is_idle=False) == ([a, b], []) and inbox.num_untaken == 0
    with pytest.raises(QueueFull, match="2 requests run or wait already"):
        inbox.put(c)
    inbox.ended(a)
    assert inbox.put(c) and inbox.num_open == 2
    inbox.cancel(b)
    assert inbox.take(is_idle=True) == ([c], [b]), "each is handed out once"
    assert inbox.take(is_idle=False) == ([], [])


def test_an_offer_stays_until_its_time_has_come() -> None:
    inbox, offer = Inbox(max_open=1), Offer(2, never)
    assert inbox.take_offer(lambda o: True) is None
    inbox.offer(offer)
    assert inbox.take_offer(lambda o: False) is None and inbox.has_offer
    assert inbox.take(is_idle=True) == ([], []), "nobody sleeps over it"
    assert inbox.take_offer(lambda o: o is offer) is offer and not inbox.has_offer


def test_draining_hands_over_everyone_who_is_open_and_shuts() -> None:
    inbox, (a, b, c), offer = Inbox(max_open=3), map(seq, range(3)), Offer(2, never)
    inbox.put(a)
    inbox.take(is_idle=False)
    inbox.put(b)
    inbox.offer(offer)
    assert inbox.drain() == [a, b] and offer.outcome.result(0) is False
    assert not inbox.put(c) and inbox.num_open == 0 and inbox.take(is_idle=True) is None
    late = Offer(3, never)
    inbox.offer(late)
    assert late.outcome.result(0) is False and inbox.drain() == []


def test_shutting_wakes_who_sleeps() -> None:
    inbox, taken = Inbox(max_open=1), []
    sleeper = threading.Thread(target=lambda: taken.append(inbox.take(is_idle=True)), daemon=True)
    sleeper.start()
    inbox.shut()
    sleeper.join(DEADLINE_S)
    assert taken == [None]
