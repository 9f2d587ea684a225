"""The plugin that stock vLLM loads, with Sparrow's attention backends and speculator.

Every vLLM process loads this package, including processes of other programs. It therefore imports
no trainer, no HTTP client, and none of Sparrow's own engines. Clients for a running vLLM are in
``sparrow.engines.vllm``.
"""
