"""The plugin that stock vLLM loads, with Sparrow's attention backends and speculator.

This package gets loaded into every vLLM process, including other programs' processes, so it imports
only what it needs: no trainer, no HTTP client, and none of Sparrow's own engines. Clients for a
running vLLM are in ``sparrow.engines.vllm``.
"""
