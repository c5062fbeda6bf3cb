"""Where engines meet the cache: one package an engine, and here what several need.

They translate, and see only the `Cache` protocol.
"""
