"""What vLLM loads: Sparrow's attention backends and speculator for stock vLLM, by its plugin
interface.

This part is in every vLLM process of somebody else's program, so it imports nothing that it does
not need: no trainer, no HTTP client, no engine of Sparrow's own. Clients of a running vLLM are in
``sparrow.engines.vllm``.
"""
