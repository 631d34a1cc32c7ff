"""A TRL environment class and reward function, unchanged. `tasks.family = "examples/environments/trl_guess.py:family"`."""

from rollmill.tasks.trl import from_trl


class GuessEnv:
    """Guess a number; the answers lead there."""

    def reset(self, secret: int, **kwargs) -> str:
        self.secret, self.num_guesses, self.solved = secret, 0, False
        return " It is between 1 and 100."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: Your guess, from 1 to 100.

        Returns:
            Whether the number is higher, lower, or right.
        """
        if self.solved:
            raise ValueError("The game is over.")
        self.num_guesses += 1
        self.solved = number == self.secret
        return "right" if self.solved else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        return 1.0 if self.solved else 0.0


def brevity(environments, **kwargs) -> list[float]:
    return [-0.01 * env.num_guesses for env in environments]


dataset = [{"prompt": [{"role": "user", "content": "Guess my number."}], "secret": n} for n in range(1, 101)]
family = from_trl(dataset, brevity, environment_factory=GuessEnv, name="guess", success_at=0.5)
