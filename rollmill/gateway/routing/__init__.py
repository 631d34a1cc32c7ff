"""Which replica answers, and what happens when it does not."""
