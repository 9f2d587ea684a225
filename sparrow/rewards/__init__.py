"""Rewards: verifiers that compare mathematical answers or run programs."""

from sparrow.rewards.code import CodeVerifier, extract_code, verify_code
from sparrow.rewards.math import MathVerifier, extract_answer, verify_math
from sparrow.rewards.sandbox import Judgement, Limits
