"""Reward responses by comparing mathematical answers or running programs."""

from sparrow.rewards.code import CodeVerifier, extract_code, verify_code
from sparrow.rewards.math import MathVerifier, extract_answer, verify_math
from sparrow.rewards.sandbox import Judgement, Limits
