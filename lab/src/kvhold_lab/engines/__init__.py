"""Real engines in child processes, and models and prompts."""
