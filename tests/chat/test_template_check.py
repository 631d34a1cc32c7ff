"""`rollmill template check` says which claims hold of a family's template, and where the first bad turn is."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from chat_worlds import CHATML, DEMO, ROOT, TEMPLATES, family, write_model
from typer.testing import CliRunner

from rollmill.chat.check import Claim, TemplateReport, check_template
from rollmill.chat.commands import template_app
from rollmill.chat.conversations import Kind, conversation
from rollmill.chat.format import ChatFormat
from rollmill.chat.messages import ChatRole
from rollmill.model.tokenizer import Tokenizer

PREFIX, TOKENS, AFTER, CLOSING, TOLD, CALLS, FORGED = range(7)


def report(tokenizer: Tokenizer, **how: int) -> TemplateReport:
    return check_template(ChatFormat(tokenizer), num_per_kind=10, **how)


def failed(of: TemplateReport) -> set[int]:
    return {n for n, claim in enumerate(of.claims) if not claim.passed}


@pytest.mark.parametrize("name", TEMPLATES)
def test_families_keep_or_break_the_claims_they_are_known_for(tmp_path: Path, name: str) -> None:
    of = report(family(tmp_path, name))
    assert failed(of) == ({PREFIX} if name in ("qwen3", "mistral") else set())
    assert all(claim.num_compared > 0 for claim in of.claims)


@pytest.mark.parametrize("model", ["demo", "SmolLM2-135M"])
def test_models_at_hand_keep_all_claims(model: str) -> None:
    path = ROOT / "models" / model
    if not (path / "tokenizer.json").is_file():
        pytest.skip(f"{path} is not there")
    of = report(Tokenizer(path))
    assert of.passed and of.tool_format == "hermes" and of.is_local and of.refused == {}


def test_dropped_reasoning_is_named_with_its_turn_and_line(tmp_path: Path) -> None:
    of = report(family(tmp_path, "qwen3"))
    claim = of.claims[PREFIX]
    assert Kind.REASONING in claim.kinds and "training stays exact" in claim.meaning
    bad = claim.first
    assert bad is not None and bad.role == "assistant" and "<think>" in bad.wanted and "<think>" not in bad.found
    lines = TEMPLATES["qwen3"].splitlines()
    assert bad.wanted_line is not None and "<think>" in lines[bad.wanted_line - 1]


def test_system_prompt_that_moves_is_named(tmp_path: Path) -> None:
    bad = report(family(tmp_path, "mistral")).claims[PREFIX].first
    assert bad is not None and bad.role == "user" and bad.message == 1


def test_template_that_numbers_its_messages_from_the_end_is_caught(tmp_path: Path) -> None:
    counting = CHATML.replace("{{ m.role }}", "{{ loop.revindex }} {{ m.role }}")
    of = report(Tokenizer(write_model(tmp_path, counting)))
    assert PREFIX in failed(of) and AFTER not in failed(of)


def test_closing_that_is_no_stop_token_is_told(tmp_path: Path) -> None:
    of = report(Tokenizer(write_model(tmp_path, CHATML.replace("<|im_end|>", "(end)"))))
    assert failed(of) >= {CLOSING} and "eos_token_id" in of.claims[CLOSING].meaning


def test_template_that_takes_no_conversation_proves_nothing(tmp_path: Path) -> None:
    of = report(Tokenizer(write_model(tmp_path, "{{ raise_exception('never') }}")))
    assert not of.passed and sum(of.refused.values()) == of.num_conversations
    assert of.claims[PREFIX] == Claim(
        name=of.claims[PREFIX].name,
        passed=False,
        num_compared=0,
        meaning="nothing could be compared: the template refused every conversation",
    )


def test_wrong_tool_format_is_found_out(tmp_path: Path) -> None:
    chat = ChatFormat(family(tmp_path, "qwen25"), tool_format="mistral")
    of = check_template(chat, num_per_kind=10)
    assert failed(of) == {CALLS}


def test_calls_are_not_asked_of_a_model_that_makes_none(tmp_path: Path) -> None:
    of = check_template(ChatFormat(family(tmp_path, "chatml"), tool_format="none"), num_per_kind=5)
    assert of.passed and len(of.claims) == TOLD + 1
    assert "the template does not show tools: the model is not told of them" in of.notes


def test_conversations_hold_what_they_promise() -> None:
    rng = random.Random(0)
    for kind in Kind:
        talks = [conversation(kind, rng, num_turns=4, control=["<|x|>"]) for _ in range(50)]
        said = [m for t in talks for m in t.messages]
        assert all(t.messages[-1].role is ChatRole.ASSISTANT for t in talks)
        assert any("<|x|>" in m.text for m in said) and any(m.text == "" for m in said)
        assert any(m.reasoning for m in said) == (kind in (Kind.REASONING, Kind.TOOL_REASONING))
        assert max(len(m.calls) for m in said) == {Kind.TEXT: 0, Kind.REASONING: 0, Kind.PARALLEL: 3}.get(kind, 1)


def test_command_prints_json_and_says_by_its_status_whether_all_holds(tmp_path: Path) -> None:
    run = CliRunner()
    fine = run.invoke(template_app, ["check", str(DEMO), "--json", "--conversations", "5", "--turns", "3", "--seed", "7"])
    facts = json.loads(fine.stdout)
    assert fine.exit_code == 0 and facts["passed"] and facts["tool_format"] == "hermes" and len(facts["claims"]) == 7
    family(tmp_path, "qwen3")
    bad = run.invoke(template_app, ["check", str(tmp_path / "qwen3"), "--conversations", "5"])
    assert bad.exit_code == 1 and "earlier turns are never rewritten" in bad.stdout and "of the template" in bad.stdout


def test_command_names_what_is_missing(tmp_path: Path) -> None:
    run = CliRunner()
    assert "tokenizer.json is missing" in " ".join(run.invoke(template_app, ["check", str(tmp_path)]).output.split())
    write_model(tmp_path, None)
    none = run.invoke(template_app, ["check", str(tmp_path)])
    assert none.exit_code == 2 and "has no chat template" in " ".join(none.output.replace("│", " ").split())
