"""The prefill role: an engine that computes prompts and pushes their KV to a decode worker."""
