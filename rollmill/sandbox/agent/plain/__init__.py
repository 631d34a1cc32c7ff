"""The agent in plain Python, for machines without a C compiler: the same frames and the same semantics, standard library only."""
