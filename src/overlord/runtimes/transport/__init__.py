"""How messages reach a role: direct calls, threads, processes over sockets, Ray actors."""
