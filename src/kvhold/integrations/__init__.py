"""Where engines meet the cache: one package an engine. They translate, nothing more, and see only the `Cache` protocol."""
