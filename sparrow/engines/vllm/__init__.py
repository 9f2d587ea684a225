"""Engines that sample with vLLM, either in this process (``VLLMEngine``) or over HTTP
(``VLLMServer``).
"""

from sparrow.engines.vllm.engine import VLLMEngine
from sparrow.engines.vllm.server import VLLMServer
