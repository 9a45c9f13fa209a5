"""What keeps processes and roles alive: the service process, its roles, the workers of a host."""
