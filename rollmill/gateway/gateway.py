"""From a call in no dialect to requests that replicas understand: where it belongs, what it may sample, which weights must answer.

Knows no wire format and no client. Over HTTP it is reached through `server`; the default harness holds a `Session` and never leaves
the process.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from rollmill.chat.call_ids import MintedIds, random_call_id
from rollmill.chat.format import ChatFormat
from rollmill.chat.messages import ChatRole
from rollmill.chat.reader import AnswerReader
from rollmill.engine.protocol import GenerateRequest
from rollmill.gateway.answering import Answering
from rollmill.gateway.call import Ask, ChatCall, TextCall, ToolChoice
from rollmill.gateway.choice import Slot
from rollmill.gateway.constraints import constraint_of
from rollmill.gateway.dialects.dialect import MAX_TOKENS
from rollmill.gateway.recording.call_rows import EpisodeRecord
from rollmill.gateway.recording.record import Recorder
from rollmill.gateway.routing.pins import Pins
from rollmill.gateway.routing.replicas import NoAnswer, Replicas
from rollmill.gateway.sessions.episode import Episode
from rollmill.gateway.sessions.episodes import Episodes
from rollmill.gateway.sessions.placement import EpisodeClosed, EpisodeFull, Placement, Sampling
from rollmill.gateway.sessions.session import Session
from rollmill.gateway.sessions.skew import Skew
from rollmill.web import ApiError

# Encoding a text of this many characters takes about a millisecond; longer ones leave the event loop.
INLINE_CHARS = 10_000
SHUTTING_DOWN = "the gateway is shutting down"
# Rendering takes a hundredth of that.
RENDER_CHARS = 500_000
# A template runs on whatever shapes the client sent; what it trips over is the client's to mend.
_UNRENDERED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


class _Prompt(NamedTuple):
    ids: list[int]
    placement: Placement | None = None


class Gateway:
    """Owns the episodes and the way to the replicas.

    `name` is what the policy is called in model names; `pins` says which weights a name means.
    """

    def __init__(
        self,
        chat: ChatFormat,
        replicas: Replicas,
        *,
        name: str = "policy",
        pins: Pins | None = None,
        wants_routes: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        """`wants_routes`: episodes ask for the experts of every token, which a trainer that replays them needs."""
        self.chat, self.replicas, self.name, self.recorder = chat, replicas, name, recorder
        self._pins = pins if pins is not None else Pins(name)
        self.wants_routes = wants_routes
        self.episodes = Episodes(chat, wants_routes=wants_routes)
        self.ended_tally: Counter[str] = Counter()
        """What happened in the episodes that have ended, all together."""
        self.ended_skew = Skew()
        """How far the text of their answers is from their tokens."""
        self._counting: set[asyncio.Task[None]] = set()
        self._stop_ids = sorted(chat.tokenizer.stop_ids)
        self._running: dict[str | None, set[Answering]] = {}

    def open_session(self, key: str, *, seed: int, temperature: float, min_version: int | None = None) -> Session:
        """A conversation of the default harness."""
        episode = Episode(
            key,
            self.chat,
            seed=seed,
            sampling=Sampling(temperature=temperature),
            min_version=min_version,
            wants_routes=self.wants_routes,
        )
        return Session(episode, self.replicas)

    def answer(
        self, call: ChatCall | TextCall, episode: Episode | None, *, deadline: float, is_hurried: bool = False, queue: str = ""
    ) -> Answering:
        """Nothing is sent before it is awaited. `deadline`: in `time.monotonic` seconds. `is_hurried`: it is the client's own, and
        sooner than ours would be. `queue`: whose line to wait in at a replica."""
        return Answering(self, call, episode, deadline=deadline, is_hurried=is_hurried, queue=queue)

    def open_episode(self, key: str, *, is_owned: bool = False, **options: Any) -> Episode:
        """A new episode; `options` are those of `Episode`. ValueError when the key was used before."""
        episode = self.episodes.open(key, is_owned=is_owned, **options)
        if self.recorder is not None:
            said = {name: msgspec.to_builtins(value) for name, value in {"is_owned": is_owned, **options}.items()}
            self.recorder.put(EpisodeRecord(key=key, at=time.time(), is_open=True, options=said))
        return episode

    def end_episode(self, key: str) -> Episode | None:
        """Close it and stop what still runs in it: nothing is sampled for it any more. None when it is not open."""
        episode = self.episodes.close(key)
        if episode is not None:
            self._ended(episode)
        for answering in list(self._running.get(key, ())):
            answering.end(closed_error(key))
        return episode

    def sweep(self, now: float) -> None:
        """Close the episodes that nobody owns and nobody has used for long."""
        for episode in self.episodes.sweep(now):
            self._ended(episode)

    def _ended(self, episode: Episode) -> None:
        self.ended_tally += episode.tally
        counting = asyncio.create_task(self._count_skew(episode))
        self._counting.add(counting)
        counting.add_done_callback(self._counting.discard)
        if self.recorder is not None:
            self.recorder.put(EpisodeRecord(key=episode.key, at=time.time(), is_open=False))

    async def _count_skew(self, episode: Episode) -> None:
        # Encoding all its answers again takes a while, and nobody else uses it any more.
        skew = await asyncio.to_thread(episode.skew)
        self.ended_skew += skew

    def watch(self, answering: Answering) -> None:
        key = answering.episode.key if answering.episode is not None else None
        self._running.setdefault(key, set()).add(answering)

    def unwatch(self, answering: Answering) -> None:
        key = answering.episode.key if answering.episode is not None else None
        running = self._running.get(key)
        if running is not None:
            running.discard(answering)
            if not running:
                del self._running[key]

    def stop_running(self, why: str) -> None:
        """End every call that runs: its client is told `why`, a stream by its last event, as long as there is a server to tell it."""
        for running in list(self._running.values()):
            for answering in list(running):
                answering.end(ApiError(503, why, extra={"retryable": True}))

    def num_sampling(self, episode: Episode) -> int:
        return sum(answering.num_open for answering in self._running.get(episode.key, ()))

    async def slots(self, call: ChatCall | TextCall, episode: Episode | None, *, queue: str) -> list[Slot]:
        """One request per choice, prompt by prompt."""
        if episode is not None and episode.is_closed:
            raise closed_error(episode.key)
        is_imposed = episode is not None and episode.sampling is not None
        # No agent picks the weights that it is trained on.
        version = None if is_imposed else await self._version(call.model, is_any=episode is not None)
        try:
            prompts = await self._prompts(call, episode)
            constraint = constraint_of(call, self.chat)
        except EpisodeClosed as error:
            raise closed_error(str(episode.key if episode is not None else "")) from error
        except EpisodeFull as error:
            raise ApiError(413, str(error)) from error
        except _UNRENDERED as error:
            raise _unrendered(error) from error
        sampling = _sampling(call, episode, is_pinned=self._is_pin(call.model))
        session = episode.key if episode is not None else _opening(call)
        max_tokens = _max_tokens(call, episode)
        slots: list[Slot] = []
        for prompt in prompts:
            for _ in range(call.num_choices):
                request = GenerateRequest(
                    prompt_ids=prompt.ids,
                    max_tokens=max_tokens,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    seed=self._seed(call, episode, len(slots)),
                    stop_ids=self._stop_ids,
                    session=session,
                    queue=queue,
                    min_version=episode.min_version if episode is not None else None,
                    exact_version=version,
                    routes_from=prompt.placement.routes_from if prompt.placement is not None else None,
                    num_top=call.num_top_logprobs or 0,
                    constraint=constraint,
                )
                slots.append(Slot(request=request, placement=prompt.placement))
        return slots

    def reader(self, call: ChatCall | TextCall, request: GenerateRequest) -> AnswerReader:
        """Of an answer to this request. Where its seed is known the ids of its calls are the same every time."""
        if not isinstance(call, ChatCall):
            return self.chat.text_reader(stops=call.stops)
        tools = call.tools if call.tool_choice is not ToolChoice.NONE else ()
        prompt_ids, seed = request.prompt_ids, request.seed
        return self.chat.reader(
            stops=call.stops,
            has_tools=bool(tools),
            tools=tools,
            prompt_ids=prompt_ids,
            mint=random_call_id if seed is None else MintedIds(f"{request.session}/{seed}/{len(prompt_ids)}"),
            streams_calls=call.stream,
        )

    async def version_of(self, model: str) -> int | None:
        """The weight version that a model name asks for; None: whichever is served. ApiError 404 for names that mean nothing."""
        return await self._version(model, is_any=False)

    async def _version(self, model: str, *, is_any: bool) -> int | None:
        """Within an episode a foreign name means the policy: agents have theirs built in."""
        if not model:
            return None
        try:
            return await self._pins.resolve(model)
        except ValueError as error:
            if is_any and not self._is_pin(model):
                return None
            raise ApiError(404, str(error), extra={"param": "model", "code": "model_not_found"}) from error
        except NoAnswer as error:
            raise ApiError(503, error.reason, headers={"retry-after": "1"}, extra={"retryable": True}) from error

    def _is_pin(self, model: str) -> bool:
        return model.startswith((f"{self.name}:", f"{self.name}@"))

    async def _prompts(self, call: ChatCall | TextCall, episode: Episode | None) -> list[_Prompt]:
        """What is sampled from. Within an episode this happens here and now, so that its graph has one owner."""
        if episode is not None:
            return [_Prompt(p.prompt_ids, p) for p in self._placed(call, episode)]
        if _num_chars(call) > RENDER_CHARS:
            return await asyncio.to_thread(lambda: self._encoded(self._texts(call)))
        texts = self._texts(call)
        return self._encoded(texts) if self._is_quick(texts) else await asyncio.to_thread(self._encoded, texts)

    def _texts(self, call: ChatCall | TextCall) -> Sequence[str | list[int]]:
        return [self.chat.prompt_text(call.messages, call.tools)] if isinstance(call, ChatCall) else call.prompts

    @staticmethod
    def _placed(call: ChatCall | TextCall, episode: Episode) -> list[Placement]:
        if isinstance(call, ChatCall):
            return [episode.place(call.messages, call.tools)]
        return [episode.place_text(p) if isinstance(p, str) else episode.place_ids(p) for p in call.prompts]

    def _is_quick(self, texts: Sequence[str | list[int]]) -> bool:
        """Whether encoding them takes a millisecond or two: they are short, or most of what they say was said before."""
        if sum(len(t) for t in texts if isinstance(t, str)) <= INLINE_CHARS:
            return True
        return sum(self.chat.encoding.num_new(t) for t in texts if isinstance(t, str)) <= INLINE_CHARS

    def _encoded(self, texts: Sequence[str | list[int]]) -> list[_Prompt]:
        return [_Prompt(self.chat.encoding.encode(t) if isinstance(t, str) else t) for t in texts]

    @staticmethod
    def _seed(call: Ask, episode: Episode | None, index: int) -> int | None:
        if episode is not None and (episode.sampling is not None or call.seed is None):
            return episode.next_seed()
        return None if call.seed is None else (call.seed + index) % 2**63

    async def close(self) -> None:
        """Stop what runs. Episodes stay open in the record, so that a gateway that starts again goes on with them."""
        self.stop_running(SHUTTING_DOWN)
        await asyncio.gather(*self._counting)
        await self.replicas.close()
        if self.recorder is not None:
            await self.recorder.close()


def closed_error(key: str) -> ApiError:
    return ApiError(410, f"episode {key!r} has ended; nothing is sampled for it any more")


def _unrendered(error: Exception) -> ApiError:
    return ApiError(400, f"this cannot be rendered for the model: {error or type(error).__name__}")


def _num_chars(call: ChatCall | TextCall) -> int:
    if isinstance(call, ChatCall):
        return sum(len(m.text) for m in call.messages)
    return sum(len(p) for p in call.prompts if isinstance(p, str))


def _opening(call: ChatCall | TextCall) -> str:
    """What a conversation without an episode is known by: its first messages, so that its next turn finds the same replica's cache."""
    opening = blake3()
    if isinstance(call, ChatCall):
        for message in call.messages:
            opening.update(message.key())
            if message.role is ChatRole.USER:
                break
    else:
        opening.update(msgspec.msgpack.encode(call.prompts[0][:256]))
    return opening.hexdigest(length=16)


def _max_tokens(call: Ask, episode: Episode | None) -> int:
    asked = MAX_TOKENS if call.max_tokens is None else call.max_tokens
    most = episode.max_answer_tokens if episode is not None else None
    return asked if most is None else min(asked, most)


def _sampling(call: Ask, episode: Episode | None, *, is_pinned: bool) -> Sampling:
    """The episode's own where it has one, whatever the client wishes: what is trained must be sampled as the run says.

    `is_pinned`: it asks for certain weights, which such an episode does not give either.
    """
    if episode is None or episode.sampling is None:
        return Sampling(
            temperature=1.0 if call.temperature is None else call.temperature,
            top_p=1.0 if call.top_p is None else call.top_p,
            top_k=call.top_k or 0,
        )
    imposed = episode.sampling
    wishes = ((call.temperature, imposed.temperature), (call.top_p, imposed.top_p), (call.top_k, imposed.top_k), (call.seed, None))
    if is_pinned or any(wish is not None and wish != ours for wish, ours in wishes):
        episode.tally["overridden"] += 1
    return imposed
