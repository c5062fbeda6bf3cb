"""One package per engine. They see only the `Cache` protocol."""
