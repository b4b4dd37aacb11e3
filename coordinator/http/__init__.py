"""The HTTP front: an OpenAI-compatible API in the coordinator's own process and event loop."""
