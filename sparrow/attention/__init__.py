"""Page attention: what the sparse actor attends to."""

from sparrow.attention.api import Implementation, decode, paged_decode, teacher_forced, update_landmarks
from sparrow.attention.pages import PageLayout

__all__ = ["Implementation", "PageLayout", "decode", "paged_decode", "teacher_forced", "update_landmarks"]
