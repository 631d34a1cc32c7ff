"""A server that speaks the Tinker protocol over our trainer and engine: the published SDK runs against it unchanged."""
