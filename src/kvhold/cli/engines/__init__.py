"""For every command that runs engines on small models: vLLM stepped by hand, and checkpoints that are there whole or not at all."""
