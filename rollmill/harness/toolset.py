"""What an agent may call: the toolset seam, and toolsets made from typed Python functions.

Whatever a model writes as arguments is either valid or answered with one line of advice; knows no model, no box and no task.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache, partial
from typing import Annotated, Any, NotRequired, Protocol, Required, TypeVar, get_type_hints

import msgspec
from pydantic import ConfigDict, Field, PydanticSchemaGenerationError, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from rollmill.chat.messages import ChatMessage, ChatRole, Tool
from rollmill.records import Boundary, RunFailure

SYSTEM = "You are a coding agent. Use the tools, then submit."
NO_OUTPUT = "(no output)"
NUM_THREADS = 64
"""Blocking tools that may run at once in a process; a pool of their own, so that a slow tool never holds up anything else."""

T = TypeVar("T")


class CallError(ValueError):
    """A call that cannot be done as written; the text is what the model is told."""


class Toolset(Protocol):
    """Tools of one episode. Four members are optional: `read_only`, names of calls that may run at the same time; `start()`, awaited
    before the first turn, whose text (or None) is added to the last opening message; `facts()`, what the grader may want to know;
    `close()`, awaited when the attempt fails, so that nobody grades it."""

    ends: frozenset[str]
    """Calls that end the episode once they succeed, such as `submit`."""

    def tools(self) -> tuple[Tool, ...]: ...

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """CallError for what the model did wrong; RunFailure for what it could not help."""
        ...


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How the default agent plays one task. None: the run's own limit."""

    system: str = ""
    """Empty: no system message."""
    opening: tuple[ChatMessage, ...] = ()
    """The whole opening, in place of `system` and the instruction: few-shot examples, a prompt of several messages."""
    show_tools: bool = True
    """The tools' schemas go into the prompt by the model's chat template."""
    strict: bool = True
    """False: arguments are coerced where that is safe ("3" for 3) and unknown ones ignored."""
    needs_call: bool | None = None
    """A reply without a call is an error, not the answer. None: when the toolset has a call that ends the episode."""
    no_call: str = "error: no tool call found; tools: {tools}"
    """What the model is told about a reply without the call that is needed."""
    told_as: ChatRole = ChatRole.USER
    """The role of advice on a reply that holds no readable call; results are always `tool` messages."""
    max_calls_per_turn: int = 16
    max_turns: int | None = None
    max_tokens_per_turn: int | None = None
    max_episode_tokens: int | None = None


class NoTools:
    """For tasks that are answered in words."""

    ends: frozenset[str] = frozenset()

    def tools(self) -> tuple[Tool, ...]:
        return ()

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        raise CallError("error: there are no tools; answer in words")


class FunctionTools:
    """Tools from typed functions: the docstring's first paragraph describes one, its `Args:` section the arguments.

    >>> def add(a: int, b: int = 1) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> FunctionTools([add]).tools()[0].parameters["required"]
    ['a']
    """

    def __init__(
        self,
        functions: Iterable[Callable[..., Any]] | Mapping[str, Callable[..., Any]] | object,
        *,
        ends: Iterable[str] = (),
        read_only: Iterable[str] = (),
        strict: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        """`functions`: callables, name -> callable, or an object whose public methods are the tools. Blocking ones run in a thread.

        What a function raises is told to the model, but for ConnectionError and TimeoutError: those are the environment's own trouble,
        and the attempt is repeated.
        """
        self._functions = named(functions)
        self._forms = {name: form_of(getattr(f, "__func__", f), inspect.ismethod(f), strict) for name, f in self._functions.items()}
        self.ends, self.read_only, self._timeout_s = frozenset(ends), frozenset(read_only), timeout_s
        if unknown := sorted((self.ends | self.read_only) - set(self._functions)):
            raise ValueError(f"there is no tool {unknown[0]!r}; tools: {', '.join(self._functions)}")
        self.num_raised = 0
        """Calls that ended in an exception of the function's own."""

    def tools(self) -> tuple[Tool, ...]:
        return tuple(form.tool if form.tool.name == n else msgspec.structs.replace(form.tool, name=n) for n, form in self._forms.items())

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        return said(await self._do(name, self.checked(name, arguments)))

    def checked(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments as the function takes them; CallError with one line of advice."""
        form = self._forms.get(name)
        if form is None:
            raise CallError(f"error: unknown tool {name[:40]!r}; tools: {', '.join(self._forms)}")
        try:
            text = json.dumps(arguments, ensure_ascii=False)
        except RecursionError as error:
            raise CallError(f"error: {name} cannot take these arguments: they are nested too deeply") from error
        clean = _HALF.sub("\ufffd", text)
        try:
            found = form.adapter.validate_json(clean)
        except ValidationError as error:
            raise CallError(self._advice(name, form, arguments, error)) from error
        if clean != text:
            # JSON can spell half a surrogate pair, which no file, shell or tokenizer takes.
            broken = next(a for a, v in arguments.items() if _HALF.search(json.dumps([a, v], ensure_ascii=False)))
            raise CallError(f"error: {broken[:40]!r} of {name} holds a character that is not text")
        return dict(found)

    def _advice(self, name: str, form: Form, arguments: dict[str, Any], error: ValidationError) -> str:
        problems = error.errors(include_url=False, include_context=False)
        # What is wrong with an argument is said before what is one too many.
        problems.sort(key=lambda p: p["type"] == "extra_forbidden")
        problem = problems[0]
        if not problem["loc"]:
            return f"error: {name} cannot take these arguments: {problem['msg']}"
        argument = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
            return f"error: {name} has no argument {argument[:40]!r}; it takes: {', '.join(form.arguments) or 'none'}"
        wanted = f"error: {name} needs the {form.arguments[argument]} argument {argument!r}"
        if problem["type"] == "missing" and len(problem["loc"]) == 1:
            return wanted
        got = json.dumps(problem["input"], default=str)
        got = got if len(got) <= 60 else f"{got[:57]}..."
        if problem["type"].endswith(("_type", "_parsing")) and problem["input"] == arguments[argument]:
            return self._wrong_type(wanted, got)
        where = "".join(f"[{json.dumps(step)}]" for step in problem["loc"][1:])
        return f"error: {argument + where!r} of {name}: {problem['msg']}, got {got}"

    def _wrong_type(self, wanted: str, got: str) -> str:
        return f"{wanted}, got {got}"

    async def _do(self, name: str, arguments: dict[str, Any]) -> Any:
        function = self._functions[name]
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await called(function, **arguments)
        except (CallError, RunFailure):
            raise
        except TimeoutError as error:
            if limit.expired():
                return f"error: {name} did not answer within {self._timeout_s:g} s"
            raise RunFailure(Boundary.TASK, f"tool {name} timed out: {error}") from error
        except ConnectionError as error:
            raise RunFailure(Boundary.TASK, f"tool {name} lost its connection: {error}") from error
        except Exception as error:  # noqa: BLE001
            # Authors signal a bad move by raising, as the field does. The call itself was valid: the model reads the reason and goes on.
            self.num_raised += 1
            return f"error: {error}" if str(error) else f"error: {type(error).__name__}"


async def called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result of foreign code, awaited when it is a coroutine and run in a thread when it may block."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await function(*args, **kwargs)
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(_threads(), lambda: context.run(function, *args, **kwargs))
    return await found if inspect.isawaitable(found) else found


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tool")


def said(result: Any) -> str:
    """What a tool returned, as the model reads it."""
    if result is None:
        return NO_OUTPUT
    if isinstance(result, dict | list):
        return json.dumps(result, ensure_ascii=False, default=str)
    return str(result)


def named(functions: Iterable[Callable[..., Any]] | Mapping[str, Callable[..., Any]] | object) -> dict[str, Callable[..., Any]]:
    if isinstance(functions, Mapping):
        return dict(functions)
    if isinstance(functions, Sequence | Set | Iterator):
        several = list(functions)
        found = {getattr(f, "__name__", type(f).__name__): f for f in several}
        if len(found) < len(several):
            raise ValueError(f"two tools have one name; rename one of {', '.join(found)}, or give a mapping of name to function")
        return found
    # Looked up on the class: a property of the instance must not be computed to learn that it is none of the tools.
    names = [n for n in dir(type(functions)) if not n.startswith("_") and callable(inspect.getattr_static(type(functions), n))]
    return {n: getattr(functions, n) for n in _in_order(type(functions), names)}


def _in_order(owner: type, names: list[str]) -> list[str]:
    """As written in the class, base classes first."""
    order = {n: i for i, n in enumerate(dict.fromkeys(n for c in reversed(owner.__mro__) for n in vars(c)))}
    return sorted(names, key=lambda n: order.get(n, len(order)))


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """What a function takes."""

    tool: Tool
    adapter: Any
    """Validates the JSON text of the arguments."""
    arguments: dict[str, str]
    """Name -> what it takes, in words; in order."""


@lru_cache(maxsize=1024)
def form_of(function: Callable[..., Any], is_method: bool, strict: bool) -> Form:
    """Kept per function: a toolset is made for every episode, a schema only once."""
    target = function.func if isinstance(function, partial) else function if inspect.isroutine(function) else type(function).__call__
    name = getattr(function, "__name__", type(function).__name__)
    parameters = list(inspect.signature(function).parameters.values())[int(is_method) :]
    docs = _argument_docs(inspect.getdoc(function) or "")
    try:
        hints = get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ValueError(f"tool {name!r} has a type hint that cannot be looked up: {error}; define the type in a module") from error
    fields: dict[str, Any] = {}
    for p in parameters:
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise ValueError(f"tool {name!r} takes {p}: a model can only be told of named arguments; list them one by one")
        extra: Any = {"default": p.default} if isinstance(p.default, str | int | float | None) else None
        hint = _ANNOTATED[hints.get(p.name, Any), Field(description=docs.get(p.name), json_schema_extra=extra)]
        fields[p.name] = _REQUIRED[hint] if p.default is p.empty else _NOT_REQUIRED[hint]
    shape = _TYPED_DICT(name, fields)
    shape.__pydantic_config__ = ConfigDict(strict=strict, extra="forbid" if strict else "ignore", coerce_numbers_to_str=not strict)
    try:
        adapter = TypeAdapter(shape)
    except PydanticSchemaGenerationError as error:
        raise ValueError(f"tool {name!r} has an argument whose type JSON cannot carry: {error}") from error
    schema = _untitled(adapter.json_schema())
    schema.setdefault("properties", {})
    tool = Tool(name=name, description=_described(function), parameters=schema)
    return Form(tool=tool, adapter=adapter, arguments={a: _kind(s, schema.get("$defs", {})) for a, s in schema["properties"].items()})


# Types made at run time; a type checker wants them written out.
_ANNOTATED: Any = Annotated
_REQUIRED: Any = Required
_NOT_REQUIRED: Any = NotRequired
_TYPED_DICT: Any = TypedDict

_HALF = re.compile("[\ud800-\udfff]")
_KINDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true/false", "array": "list", "object": "object"}
_SECTION = re.compile(r"^(Args|Arguments|Parameters):\s*$")
_ENTRY = re.compile(r"^(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def _described(function: Callable[..., Any]) -> str:
    return " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())


def _argument_docs(text: str) -> dict[str, str]:
    """The `Args:` section: name -> its words, continued lines joined."""
    found: dict[str, str] = {}
    is_inside, depth, last = False, -1, ""
    for line in text.splitlines():
        if _SECTION.match(line):
            is_inside = True
        elif is_inside and line.strip():
            indent = len(line) - len(line.lstrip())
            if indent == 0:
                break
            depth = indent if depth < 0 else depth
            if indent == depth and (entry := _ENTRY.match(line.strip())):
                last = entry[1]
                found[last] = entry[2]
            elif last:
                found[last] = f"{found[last]} {line.strip()}".strip()
    return found


def _untitled(schema: Any) -> Any:
    """Without the titles that pydantic makes from names: they would cost tokens in every prompt and say nothing."""
    if isinstance(schema, list):
        return [_untitled(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        k: {n: _untitled(s) for n, s in v.items()} if k in ("properties", "$defs") else _untitled(v)
        for k, v in schema.items()
        if not (k == "title" and isinstance(v, str))
    }


def _kind(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    """What an argument takes, in words."""
    if "$ref" in schema:
        return _kind(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "enum" in schema or "const" in schema:
        return "|".join(str(v) for v in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(s, defs) for s in schema["anyOf"] if s.get("type") != "null"))
    return _KINDS.get(str(schema.get("type")), "JSON")
