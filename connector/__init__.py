"""What moves between processes: messages, handoff state, NIXL transport, ZeroMQ channels."""
