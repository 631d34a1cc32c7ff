"""Small models to talk to: the demo vocabulary with other control tokens, and templates that behave like those of known families."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rollmill.chat.messages import Call, ChatMessage, ChatRole, Tool
from rollmill.model.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_QWEN_TOOLS = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- 'You may call these functions:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>\nAnswer with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>.<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}
{%- endif %}
"""
_QWEN_CALLS = r"""
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"""

QWEN25 = (
    _QWEN_TOOLS
    + r"""
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + (message.content or '') }}"""
    + _QWEN_CALLS
    + "{%- endif %}"
)

QWEN3 = (
    _QWEN_TOOLS
    + r"""
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or message.reasoning_content) %}
            {{- '<think>\n' + (message.reasoning_content or '') | trim + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content or '' }}"""
    + _QWEN_CALLS
    + r"{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)

LLAMA3 = r"""{{- bos_token }}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + strftime_now('%d %b %Y') + '\n\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|eot_id|>' }}
{%- if tools %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nRespond in the format {"name": name, "parameters": {...}}.\n\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
    {{- messages[0].content | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('only one tool call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

MISTRAL = r"""{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set messages = messages[1:] %}{%- endif %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + (system + '\n\n' if loop.last and system is defined else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('call ids have nine characters') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('call ids have nine characters') }}{%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

_DS = "<\uff5c{}\uff5c>".format
DEEPSEEK = (
    "{%- set ns = namespace(results=false) %}{{- bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'system' %}{{- m.content }}{%- endif %}"
    f"{{%- if m.role == 'user' %}}{{{{- '{_DS('User')}' + m.content + '{_DS('Assistant')}' }}}}{{%- endif %}}"
    "{%- if m.role == 'assistant' and m.tool_calls %}{{- m.content }}"
    f"{{{{- '{_DS('tool▁calls▁begin')}' }}}}{{%- for c in m.tool_calls %}}"
    f"{{{{- '{_DS('tool▁call▁begin')}function{_DS('tool▁sep')}' + c.function.name + '\n```json\n' + c.function.arguments }}}}"
    f"{{{{- '\n```{_DS('tool▁call▁end')}' + ('' if loop.last else '\n') }}}}{{%- endfor %}}"
    f"{{{{- '{_DS('tool▁calls▁end')}{_DS('end▁of▁sentence')}' }}}}{{%- set ns.results = true %}}"
    f"{{%- elif m.role == 'assistant' %}}{{{{- m.content + '{_DS('end▁of▁sentence')}' }}}}{{%- endif %}}"
    "{%- if m.role == 'tool' %}{%- if ns.results %}"
    f"{{{{- '{_DS('tool▁outputs▁begin')}' }}}}{{%- set ns.results = false %}}{{%- endif %}}"
    f"{{{{- '{_DS('tool▁output▁begin')}' + m.content + '{_DS('tool▁output▁end')}' }}}}{{%- endif %}}"
    "{%- endfor %}"
)

SPECIALS: Mapping[str, tuple[str, ...]] = {
    "chatml": (),
    "qwen25": (),
    "qwen3": ("<think>", "</think>"),
    "llama3": ("<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    "mistral": (
        *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]"),
    ),
    "deepseek": tuple(
        _DS(name)
        for name in (
            *("User", "Assistant", "begin▁of▁sentence", "end▁of▁sentence", "tool▁sep"),
            *("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end"),
            *("tool▁outputs▁begin", "tool▁output▁begin", "tool▁output▁end"),
        )
    ),
}
TEMPLATES = {"chatml": CHATML, "qwen25": QWEN25, "qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL, "deepseek": DEEPSEEK}
ENDS = {
    "llama3": ("<|begin|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "deepseek": (_DS("begin▁of▁sentence"), _DS("end▁of▁sentence")),
}


def write_model(path: Path, template: Any, *, specials: Sequence[str] = (), bos: str | None = None, eos: str = "<|im_end|>") -> Path:
    """A model directory without weights, of the demo vocabulary and these control tokens."""
    path.mkdir(parents=True, exist_ok=True)
    tok = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tok.add_special_tokens(list(specials))
    tok.save(str(path / "tokenizer.json"))
    config = {"eos_token": eos, "bos_token": bos, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def family(path: Path, name: str) -> Tokenizer:
    bos, eos = ENDS.get(name, (None, "<|im_end|>"))
    return Tokenizer(write_model(path / name, TEMPLATES[name], specials=SPECIALS[name], bos=bos, eos=eos))


def pieces(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    at = sorted({c % (len(ids) + 1) for c in cuts} | {0, len(ids)})
    return [ids[a:b] for a, b in itertools.pairwise(at)]


class Bytes:
    """Every token is a byte."""

    token_bytes = {i: bytes([i]) for i in range(256)}  # noqa: RUF012

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class OpaqueBytes(Bytes):
    """The same, but nobody knows that a text is its tokens' bytes."""

    token_bytes = None  # type: ignore[assignment]


def counting_ids() -> Callable[[], str]:
    count = itertools.count()
    return lambda: f"call_{next(count)}"


def byte_fallback_tokenizer(path: Path) -> Tokenizer:
    """A vocabulary in the sentence-piece manner: words with a lower bar for the space, and bytes for everything else."""
    words = ["\u2581", "\u2581hello", "\u2581world", "lo", "hel", "w", "d", "<", "a"]
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)} | {w: n + 257 for n, w in enumerate(words)}
    tok = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tok.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    path.mkdir(parents=True, exist_ok=True)
    tok.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


def say(role: ChatRole, text: str = "", *calls: Call, reasoning: str = "", call: Call | None = None) -> ChatMessage:
    more = {"call_id": call.id, "name": call.name} if call is not None else {}
    return ChatMessage(role=role, text=text, calls=calls, reasoning=reasoning, **more)


SYSTEM, USER, ASSISTANT, TOOL = ChatRole.SYSTEM, ChatRole.USER, ChatRole.ASSISTANT, ChatRole.TOOL
LS = Tool(name="ls", description="list", parameters={"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]})
ADD = Tool(
    name="add",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "why": {"type": "string"}, "rest": {"type": "array", "items": {"type": "integer"}}},
        "required": ["a"],
    },
)
