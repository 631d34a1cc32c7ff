"""Token-exact episodes: the graph of context windows, and what of it is trained."""
