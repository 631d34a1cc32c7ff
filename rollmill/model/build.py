"""Making a new small model: a byte-level tokenizer learnt from text, and fresh weights beside it.

Words never carry a leading space and digits stand alone, so that a name is the same tokens wherever it occurs: copying a
file name from the instruction into a tool call is then a copy of tokens, which a small model can learn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from rollmill.model.checkpoint import save_model
from rollmill.model.config import ModelConfig
from rollmill.model.transformer import Model

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Learn a byte-pair vocabulary and write the tokenizer files."""
    tok = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+|\d|[^\p{L}\d]+"), "isolated")
    tok.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tok.train_from_iterator(texts, trainer)
    path.mkdir(parents=True, exist_ok=True)
    tok.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "stop_tokens": ["<|endoftext|>"],
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def new_model(path: Path, *, hidden_size: int, num_layers: int, head_dim: int, max_position: int, seed: int) -> None:
    """Fresh weights for the tokenizer that lies at `path`."""
    tok = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    config = ModelConfig(
        vocab_size=-(-tok.get_vocab_size() // 16) * 16,
        hidden_size=hidden_size,
        intermediate_size=-(-hidden_size * 8 // 3 // 16) * 16,
        num_layers=num_layers,
        num_heads=hidden_size // head_dim,
        num_kv_heads=hidden_size // head_dim,
        head_dim=head_dim,
        max_position=max_position,
        eos_token_ids=tuple(i for s in ("<|im_end|>", "<|endoftext|>") if (i := tok.token_to_id(s)) is not None),
    )
    model = Model(config)
    model.init_weights(seed)
    save_model(model, path)
