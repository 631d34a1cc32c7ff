"""Conversations: messages, the model's own way to write them, and the way back from sampled tokens."""
