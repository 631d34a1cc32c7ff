"""The agent and the zygote in C, and how they are built."""
