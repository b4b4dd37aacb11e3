"""The embedded checkpoint: a small trained Ouro that solves word problems."""
