"""The service: admission, routing, credits, worker registry and the client library."""
