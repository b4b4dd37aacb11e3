"""Commands: the launcher, the worker, the terminal client."""
