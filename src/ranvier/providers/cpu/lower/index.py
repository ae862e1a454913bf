"""Which module lowers which operator in kernels of the CPU's own; what is not here is lowered to shared loops."""

from __future__ import annotations

from ranvier.codegen.definitions.lower.index import SHARED
from ranvier.codegen.definitions.registry import Lowerings

# module -> the operators it declares, those of other domains with their domain
_OPERATORS = {
    "attention": "Attention",
    "bitlinear": "ranvier::BitLinear",
    "cumulative": "CumProd CumSum",
    "dequantize": """
        Conv DequantizeLinear Gemm MatMul com.microsoft::DequantizeLinear com.microsoft::FusedGemm
    """,
    "determinant": "Det",
    "experts": "com.microsoft::MoE com.microsoft::QMoE",
    "flexible": "ai.onnx.preview::FlexAttention",
    "grouped_heads": "com.microsoft::GroupQueryAttention",
    "heads_by_projection": "com.microsoft::Attention com.microsoft::MultiHeadAttention",
    "integer_convolution": "ConvInteger QLinearConv com.microsoft::QLinearConv",
    "integer_product": """
        MatMulInteger QLinearMatMul com.microsoft::DynamicQuantizeMatMul com.microsoft::MatMulIntegerToFloat
        com.microsoft::QGemm
    """,
    "linear_attention": "LinearAttention",
    "lookup": "Gather",
    "multinomial": "Multinomial",
    "quantized_heads": "com.microsoft::QAttention",
    "quantized_lstm": "com.microsoft::DynamicQuantizeLSTM",
    "ranking": "TopK",
    "fourier": "DFT ReduceL2 ReduceSum ReduceSumSquare STFT",
    "recurrent": "GRU LSTM RNN ranvier::LSTMSlopes ranvier::LSTMTraining",
    "scatter": "Scatter ScatterElements ScatterND TensorScatter",
    "short_product": "com.microsoft::MatMulInteger16",
    "trees": "ai.onnx.ml::TreeEnsemble ai.onnx.ml::TreeEnsembleClassifier ai.onnx.ml::TreeEnsembleRegressor",
    "unpool": "MaxUnpool",
    "weight_only": """
        com.microsoft::MatMulBlockQuantizedFp4Weight com.microsoft::MatMulBlockQuantizedFp8Weight
        com.microsoft::MatMulBnb4 com.microsoft::MatMulNBits
    """,
}

LOWERINGS = Lowerings("ranvier.providers.cpu.lower", _OPERATORS, parent=SHARED)
lowers, tries = LOWERINGS.lowers, LOWERINGS.tries
