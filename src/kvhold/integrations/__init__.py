"""Where engines meet the cache: one package an engine. They see only the `Cache` protocol."""
