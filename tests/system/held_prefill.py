"""A prefill worker whose WRITEs wait for a file to appear: `held_prefill.py CONFIG GATE`."""
