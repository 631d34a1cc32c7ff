"""Rows with a reward: questions answered in words, no box. `tasks.family = "examples/environments/sums.py:family"`."""

from rollmill.tasks import Attempt, RowFamily

rows = [
    {"prompt": f"What is {a} + {b}? Answer with the number.", "answer": a + b, "level": 1 + (a > 9)} for a in range(20) for b in range(9)
]


def reward(attempt: Attempt, row: dict) -> float:
    words = attempt.answer.split()
    return float(bool(words) and words[-1].strip(".") == str(row["answer"]))


family = RowFamily(rows, reward, name="sums", system="You are good at sums.")
