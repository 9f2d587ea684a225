"""Rewards of responses: mathematical answers and programs, compared or run."""

from sparrow.rewards.code import CodeVerifier, extract_code, verify_code
from sparrow.rewards.math import MathVerifier, extract_answer, verify_math
from sparrow.rewards.sandbox import Judgement, Limits
