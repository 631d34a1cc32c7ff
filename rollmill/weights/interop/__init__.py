"""Ways in and out of a weight store for those who speak another format; none of them is needed to train or to serve."""
