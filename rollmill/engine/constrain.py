"""Constraints as the sampler needs them: a grammar compiled once, a `Guide` per request that knows which tokens may come next, and
their masks as bits; knows no tensor and no queue.

llguidance does the parsing. A guide moves only when its request gets a token, so a request that is put back and computed again
finds it where it was. Shapes: R guided rows, W words of 32 tokens.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from rollmill.engine.protocol import Constraint, ConstraintKind, GenerateRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

INSTALL = "pip install 'rollmill[constrain]'"
COMPILE_S = 10.0
"""Longest that a request waits for its grammar. llguidance's own limits on fuel and grammar size end a compilation well before."""
CACHE_CHARS = 8 * 2**20
_ENTRY_CHARS = 4096
MAX_MASK_THREADS = 8
_ALL = np.uint32(0xFFFFFFFF)


class StillCompiling(RuntimeError):
    """The grammars before it take long; trying again may help."""


class Guide:
    """Where one request stands in its grammar."""

    def __init__(self, matcher: LLMatcher, *, stop_ids: frozenset[int], eos_id: int) -> None:
        self.matcher, self._stop_ids, self._eos_id = matcher, stop_ids, eos_id
        self.is_forced = False
        """Whether the last mask left one token."""
        self.problem = ""
        """Why it cannot go on; the request ends by it."""

    def settle(self, mask_W: np.ndarray) -> None:
        """Finish the row that llguidance filled: where the text may end this request's stop ids stand for the tokenizer's own."""
        if self.matcher.is_error():
            self._fail(self.matcher.get_error(), mask_W)
            return
        if self.matcher.is_accepting():
            mask_W[self._eos_id >> 5] &= ~np.uint32(1 << (self._eos_id & 31))
            for stop in self._stop_ids:
                mask_W[stop >> 5] |= np.uint32(1 << (stop & 31))
        words = mask_W[mask_W != 0]
        if not len(words):
            self._fail("no token of this model goes on from here", mask_W)
            return
        self.is_forced = len(words) == 1 and int(words[0]).bit_count() == 1

    def _fail(self, problem: str, mask_W: np.ndarray) -> None:
        self.problem = first_lines(problem)
        # The row is sampled with the others and thrown away; without a single open token its numbers would be none.
        mask_W[:] = _ALL

    def take(self, token: int) -> bool:
        """The request got this token. False: it cannot have it, see `problem`."""
        if not self.problem and token not in self._stop_ids and not self.matcher.consume_token(token):
            self.problem = first_lines(self.matcher.get_error())
        return not self.problem


class Masks:
    """Which tokens the next step may sample, for all guided rows of a step together."""

    def __init__(self, vocab_size: int, *, num_threads: int) -> None:
        """More threads than idle cores make it slower: a step's masks wait for the last of them."""
        from llguidance import LLExecutor

        self._num_words = -(-vocab_size // 32)
        self._executor = LLExecutor(min(num_threads, MAX_MASK_THREADS)) if num_threads > 1 else None

    def fill(self, guides: Sequence[Guide]) -> np.ndarray:
        """uint32[R, W]: bit i of word w is token 32 * w + i."""
        mask_RW = np.zeros((len(guides), self._num_words), np.uint32)
        at, row_bytes = mask_RW.ctypes.data, 4 * self._num_words
        # Both give up the interpreter lock.
        if self._executor is None:
            for row, guide in enumerate(guides):
                guide.matcher.unsafe_compute_mask_ptr(at + row * row_bytes, row_bytes)
        else:
            self._executor.unsafe_compute_mask_ptr([(guide.matcher, row) for row, guide in enumerate(guides)], at, row_bytes, len(guides))
        for guide, mask_W in zip(guides, mask_RW, strict=True):
            guide.settle(mask_W)
        return mask_RW


class Constraints:
    """Compiles constraints for one model, away from the event loop and from the engine's thread."""

    def __init__(self, tokenizer_file: Path | None, *, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """`tokenizer_file`: the model's tokenizer.json, None when it has none; `eos_ids`: what ends its texts."""
        self._file, self._vocab_size, self._eos_ids = tokenizer_file, vocab_size, eos_ids
        # One worker: compiling holds a core, and the others are busy decoding.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="constrain")
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._held_chars = 0

    async def guide(self, request: GenerateRequest) -> Guide:
        """The guide of a checked request with a constraint; ValueError says why there can be none."""
        future = self._worker.submit(self.compile, request)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), COMPILE_S)
        except TimeoutError:
            if future.running():
                raise ValueError(f"the constraint was not compiled within {COMPILE_S:.0f} s; make it simpler") from None
            raise StillCompiling(f"other constraints have been compiling for {COMPILE_S:.0f} s; try again later") from None

    def compile(self, request: GenerateRequest) -> Guide:
        """What `guide` does, on the calling thread; not from two threads at once."""
        assert request.constraint is not None
        matcher, begin = self._matcher(request.constraint).deep_copy(), request.constraint_from
        said = [] if begin is None else request.prompt_ids[begin:]
        if (num_taken := matcher.try_consume_tokens(said)) < len(said):
            where = f"prompt_ids[{len(request.prompt_ids) - len(said) + num_taken}]"
            raise ValueError(f"the constraint does not allow {where}, which is behind constraint_from; send the position where it began")
        return Guide(matcher, stop_ids=frozenset(request.stop_ids), eos_id=self._tokens().eos_token)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _matcher(self, constraint: Constraint) -> LLMatcher:
        if constraint in self._compiled:
            self._compiled.move_to_end(constraint)
            return self._compiled[constraint]
        tokens = self._tokens()
        from llguidance import LLMatcher

        matcher = LLMatcher(tokens, _grammar(constraint), log_level=0)
        if matcher.is_error():
            raise ValueError(f"the {constraint.kind} constraint cannot be compiled: {first_lines(matcher.get_error())}")
        self._compiled[constraint] = matcher
        self._held_chars += _ENTRY_CHARS + len(constraint.text)
        while self._held_chars > CACHE_CHARS:
            oldest, _ = self._compiled.popitem(last=False)
            self._held_chars -= _ENTRY_CHARS + len(oldest.text)
        return matcher

    def _tokens(self) -> LLTokenizer:
        if self._tokenizer is not None:
            return self._tokenizer
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise ValueError(f"constraint needs a package that this engine lacks; install it there with `{INSTALL}`") from error
        if self._file is None:
            raise ValueError("constraint needs to know the tokens' text, and this model has no tokenizer.json; leave it out")
        if not self._eos_ids:
            raise ValueError("constraint needs a token that ends a text, and this model names none; set eos_token_id in its config.json")
        self._tokenizer = LLTokenizer(self._file.read_text(), n_vocab=self._vocab_size, eos_token=min(self._eos_ids))
        return self._tokenizer


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    if constraint.kind is ConstraintKind.REGEX:
        return LLMatcher.grammar_from_regex(constraint.text)
    if constraint.kind is ConstraintKind.LARK:
        return LLMatcher.grammar_from_lark(constraint.text)
    try:
        schema = msgspec.json.decode(constraint.text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the json_schema constraint is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise ValueError(f"the json_schema constraint is a {type(schema).__name__}, a schema is an object or a boolean")
    return LLMatcher.grammar_from_json_schema(constraint.text)


def first_lines(text: str, max_chars: int = 400) -> str:
    """What a person needs of llguidance's account: the state dump behind it is left out."""
    return " ".join(text.partition("<state>")[0].split())[:max_chars] or "the grammar has no way on"
