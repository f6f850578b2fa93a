"""The fixtures and settings of all tests: see tests/plugin.py."""

pytest_plugins = ("tests.plugin",)
