"""Sparrow in vLLM: a plugin for any program that runs vLLM, and engines for Sparrow's own trainer."""

from sparrow.engines.vllm.engine import VLLMEngine
from sparrow.engines.vllm.server import VLLMServer
