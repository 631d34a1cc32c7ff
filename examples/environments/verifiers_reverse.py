"""A `verifiers` environment with its parser and rubric, unchanged. `tasks.family = "examples/environments/verifiers_reverse.py:family"`."""

import verifiers as vf
from datasets import Dataset

from rollmill.tasks.verifiers import from_verifiers

WORDS = ("stone", "river", "lamp", "cedar", "falcon", "harbor", "violet", "tunnel", "saddle", "copper", "willow", "marble")


def load_environment() -> vf.Environment:
    dataset = Dataset.from_list([{"question": f"Reverse the word {w}.", "answer": w[::-1]} for w in WORDS])
    parser = vf.XMLParser(["answer"])

    def right(completion, answer, parser) -> float:
        return 1.0 if (parser.parse_answer(completion) or "") == answer else 0.0

    rubric = vf.Rubric(funcs=[right, parser.get_format_reward_func()], weights=[1.0, 0.1], parser=parser)
    return vf.SingleTurnEnv(dataset=dataset, system_prompt="Answer as <answer>...</answer>.", parser=parser, rubric=rubric)


def family():
    return from_verifiers(load_environment, name="reverse")
