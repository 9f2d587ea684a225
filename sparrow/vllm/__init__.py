"""The plugin that stock vLLM loads, with Sparrow's attention backends and speculator.

This package is loaded into every vLLM process, including those of other programs. It therefore
imports only what it needs: no trainer, no HTTP client, and none of Sparrow's own engines. Clients
of a running vLLM are in ``sparrow.engines.vllm``.
"""
