"""Prometheus metrics: what is counted, what is read off the state, and their text."""
