"""The stages before reinforcement learning: mid-training, supervised fine-tuning and preference learning over token shards."""
