"""One full local engine: scheduler, KV manager, executor, worker and model runner."""
