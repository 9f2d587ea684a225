"""Engines that generate with vLLM: in this process (``VLLMEngine``) or behind HTTP
(``VLLMServer``).
"""

from sparrow.engines.vllm.engine import VLLMEngine
from sparrow.engines.vllm.server import VLLMServer
