"""The HTTP server: connections, keys, limits, and one model call over them."""
