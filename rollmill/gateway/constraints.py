"""What a call's answer must follow, as the grammar a replica samples under; none where the model is free."""

from __future__ import annotations

import msgspec

from rollmill.chat.format import ChatFormat
from rollmill.engine.protocol import Constraint, ConstraintKind
from rollmill.gateway.call import ChatCall, TextCall, ToolChoice

_ANY_OBJECT = {"type": "object"}
# JSON allows white space without end, and a model that does not know what to say fills its answer with it.
_BOUNDED = {"x-guidance": {"whitespace_pattern": r"\n? {0,12}"}}
_START = "\nstart: "


def constraint_of(call: ChatCall | TextCall, chat: ChatFormat) -> Constraint | None:
    """ValueError when the model's format cannot express what is asked for."""
    if not isinstance(call, ChatCall):
        return None
    if call.tool_choice is ToolChoice.REQUIRED:
        return chat.tool_grammar(call.tools, forced_tool=call.forced_tool, parallel=call.parallel_calls)
    if call.schema is None:
        return None
    schema = msgspec.json.encode({**_BOUNDED, **(call.schema or _ANY_OBJECT)}).decode()
    if call.tools and call.tool_choice is ToolChoice.AUTO:
        return _either(chat.tool_grammar(call.tools, parallel=call.parallel_calls), schema)
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, text=schema)


def _either(calls: Constraint, schema: str) -> Constraint:
    """Calls, or an answer that follows the schema: an agent with both uses its tools first."""
    assert calls.kind is ConstraintKind.LARK and calls.text.count(_START) == 1, "the grammar of calls has one start rule"
    rules = calls.text.replace(_START, "\nsome_calls: ")
    return Constraint(kind=ConstraintKind.LARK, text=f"{rules}some_answer: %json {schema}\nstart: some_calls | some_answer\n")
