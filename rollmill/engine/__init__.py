"""The embedded inference engine: continuous batching, in-flight weight swaps and an HTTP server; `protocol` and `client` need no torch."""
