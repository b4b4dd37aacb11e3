"""The decode role: an engine that receives prompts and generates tokens."""
