"""Proofs that trainer and engine compute the same bits on this machine, and the tool that finds where they do not."""
