"""The tests. A package, so that they can share fakes: `from tests.fakes import ...`."""
