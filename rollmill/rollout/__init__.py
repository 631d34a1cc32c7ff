"""The rollout workshop: dispatcher, groups, concurrency control, single episodes and held-out evaluation."""
