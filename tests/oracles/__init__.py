"""Methods against other implementations, which the tests do not need: `make test-oracles`."""
