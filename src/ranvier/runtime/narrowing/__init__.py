"""What a narrower precision must leave alone, found out on a sample of inputs; see docs/precision.md."""

from ranvier.runtime.narrowing.calibrate import calibrated

__all__ = ["calibrated"]
