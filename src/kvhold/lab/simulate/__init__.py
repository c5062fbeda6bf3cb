"""`kvhold simulate`: what a cache of some size would have found of a trace."""
