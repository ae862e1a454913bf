"""Cases in which another runtime computes something else than the reference, with what was seen.

Each list belongs to a version: with that one a case that begins to agree must be taken out, with another one it may.
"""

from __future__ import annotations

_HALF = "an intermediate result in half precision is rounded the other way"
_FOURIER = "a Fourier transform in float32 leaves 1e-5 where there is 0"
_SCORES = "the scores that it shows lack the causal mask"
_CORNERS = "with align_corners it counts with the rounded size, the standard with the scaled one"

SEEN_WITH = {"onnxruntime": "1.31.", "openvino": "2026.4.", "mlx": "0.32."}

DEVIATIONS: dict[str, dict[str, str]] = {
    "onnxruntime": {
        "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal": _SCORES,
        "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal": _SCORES,
        "test_dft": _FOURIER,
        "test_dft_axis": _FOURIER,
        "test_dft_axis_opset19": _FOURIER,
        "test_dft_inverse": _FOURIER,
        "test_dft_inverse_opset19": _FOURIER,
        "test_dft_irfft": _FOURIER,
        "test_dft_irfft_opset19": _FOURIER,
        "test_dft_opset19": _FOURIER,
        "test_dft_rfft": _FOURIER,
        "test_dft_rfft_opset19": _FOURIER,
        "test_maxunpool_export_with_output_shape": "it reads the indices as ones into the result's own shape",
        "test_resize_downsample_scales_cubic_align_corners": _CORNERS,
        "test_resize_downsample_scales_linear_align_corners": _CORNERS,
        "test_stft": _FOURIER,
        "test_stft_with_window": _FOURIER,
    },
    "openvino": {
        "test_dynamicquantizelinear_expanded": "it rounds a quotient the other way",
        "test_resize_downsample_scales_cubic_align_corners": _CORNERS,
        "test_resize_downsample_scales_linear_align_corners": _CORNERS,
    },
    "mlx": {
        "test_attention_4d_causal_fp16_expanded": _HALF,
    },
}
