"""Tables of levels: what weights of 4 bits and fewer stand for where their codes are positions, before they are scaled.

Those of bitsandbytes are relative to the largest magnitude of a block: its float, and its normal-float (quantiles of
the normal distribution with an exact zero: Dettmers et al., QLoRA, 2023, appendix E). Between them are the numbers of
float4 as NVFP4 and MXFP4 have it. Those of llama.cpp's files are whole numbers.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

_FP4 = (0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
FP4_LEVELS = np.array([*_FP4, *(-level for level in _FP4)], np.float32)
E2M1_LEVELS = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
NF4_LEVELS = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
IQ2_LEVELS = np.array([0, -43, -25, -8, 8, 25, 43, 0], np.float32)  # no weight is the first or the last of them
_IQ3 = (2, 6, 10, 14, 18, 22, 26, 31)
IQ3_XXS_LEVELS = np.array([*(-level for level in reversed(_IQ3)), *_IQ3], np.float32)  # half of what they are there

# of integers: operators that have no place for a table have these themselves as codes
WHOLE_TABLES = (2 * E2M1_LEVELS, IQ4_LEVELS, IQ2_LEVELS, IQ3_XXS_LEVELS)
