"""Fixtures for tests of engines with vLLM."""

from tests.vllm.conftest import frozen_imports  # noqa: F401
