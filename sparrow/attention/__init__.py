"""Page-sparse attention for the sparse actor."""

from sparrow.attention.api import (
    Choice,
    Implementation,
    choose,
    decode,
    decode_several,
    paged_decode,
    teacher_forced,
    update_landmarks,
)
from sparrow.attention.decode import CachedLayers, CacheScales, DecodeWorkspace
from sparrow.attention.pages import PageLayout

__all__ = [
    "CacheScales",
    "CachedLayers",
    "Choice",
    "DecodeWorkspace",
    "Implementation",
    "PageLayout",
    "choose",
    "decode",
    "decode_several",
    "paged_decode",
    "teacher_forced",
    "update_landmarks",
]
