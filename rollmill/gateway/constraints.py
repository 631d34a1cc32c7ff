"""What a call's answer must follow, as the grammar a replica samples under; none where the model is free."""

from __future__ import annotations

from rollmill.chat.format import ChatFormat
from rollmill.engine.protocol import Constraint
from rollmill.gateway.call import ChatCall, TextCall, ToolChoice

_ANY_OBJECT = {"type": "object"}
# JSON allows white space without end, and a model that does not know what to say fills its answer with it.
_BOUNDED = {"x-guidance": {"whitespace_pattern": r"\n? {0,12}"}}


def constraint_of(call: ChatCall | TextCall, chat: ChatFormat) -> Constraint | None:
    """ValueError when the model's format cannot express what is asked for."""
    if not isinstance(call, ChatCall):
        return None
    if call.tool_choice is ToolChoice.REQUIRED:
        return chat.tool_grammar(call.tools, forced_tool=call.forced_tool, parallel=call.parallel_calls)
    if call.schema is None:
        return None
    tools = call.tools if call.tool_choice is ToolChoice.AUTO else ()
    return chat.json_grammar({**_BOUNDED, **(call.schema or _ANY_OBJECT)}, tools, parallel=call.parallel_calls)
