"""A task family of one's own: sort the numbers of a file into another one, in a box, with three tools.

Train on it with `tasks.family = "examples/environments/sorting.py:SortFamily"`.
"""

from rollmill.tasks import Attempt, Family, Grade, Task


class SortFamily(Family):
    """Levels set how many numbers there are."""

    kinds = ("up", "down")

    def make(self, *, kind: str, level: int, seed: int, split: str) -> Task:
        numbers = self.numbers(kind=kind, level=level, seed=seed, split=split)
        return self.task(
            f"write the numbers of in.txt to out.txt, one per line, sorted {kind}, then submit",
            kind=kind,
            level=level,
            seed=seed,
            split=split,
            files={"in.txt": "".join(f"{n}\n" for n in numbers)},
            tools=("bash", "read", "submit"),
        )

    async def grade(self, task: Task, attempt: Attempt) -> Grade:
        # Derived again from the seed: the agent may have changed in.txt, and the task record holds no answer.
        numbers = self.numbers(kind=task.kind, level=task.level, seed=task.seed, split=task.split)
        wanted = [str(n) for n in sorted(numbers, reverse=task.kind == "down")]
        found = attempt.files.get("out.txt", "").split()
        parts = {"present": float(bool(found)), "sorted": float(found == wanted)}
        return Grade(reward=0.1 * parts["present"] + 0.9 * parts["sorted"], success=found == wanted, parts=parts)

    def numbers(self, *, kind: str, level: int, seed: int, split: str) -> list[int]:
        rng = self.seeded(kind=kind, level=level, seed=seed, split=split)
        return [rng.randint(1, 999) for _ in range(4 * level)]
