"""Which module lowers which operator, so that only those a model needs are imported."""

from __future__ import annotations

from ranvier.codegen.definitions.registry import Lowerings

# module -> the operators it declares, those of other domains with their domain
_OPERATORS = {
    "activation": """
        Affine Celu Elu Gelu HardSigmoid HardSwish ImageScaler LeakyRelu Mish PRelu ParametricSoftplus Relu
        Scale ScaledTanh Selu Shrink Sigmoid Softplus Softsign SwiGLU Swish ThresholdedRelu
        com.microsoft::BiasGelu com.microsoft::FastGelu com.microsoft::Gelu com.microsoft::QuickGelu
    """,
    "branches": "If",
    "causal": "CausalConvWithState",
    "contraction": """
        Gemm MatMul com.microsoft::FusedGemm com.microsoft::FusedMatMul com.microsoft::TransposeMatMul
    """,
    "coded_table": "com.microsoft::GatherBlockQuantized",
    "convolution": "Conv ConvTranspose com.microsoft::FusedConv",
    "einsum": "Einsum",
    "elementwise": """
        Abs Acos Acosh Add And Asin Asinh Atan Atan2 Atanh BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr
        BitwiseXor Ceil Clip Cos Cosh Div Equal Erf Exp Floor Greater GreaterOrEqual Identity IsInf IsNaN Less
        LessOrEqual Log Max Mean Min Mod Mul Neg Not Or Pow Reciprocal Round Sign Sin Sinh Sqrt Sub Sum Tan Tanh
        Where Xor ranvier::After
    """,
    "features": """
        ai.onnx.ml::ArrayFeatureExtractor ai.onnx.ml::Binarizer ai.onnx.ml::Imputer ai.onnx.ml::LinearRegressor
        ai.onnx.ml::Normalizer ai.onnx.ml::Scaler
    """,
    "fused_contrib": """
        com.microsoft::BiasAdd com.microsoft::BiasSoftmax com.microsoft::BiasSplitGelu
        com.microsoft::EmbedLayerNormalization com.microsoft::FusedMatMulActivation com.microsoft::GatedAdd
        com.microsoft::GemmFastGelu com.microsoft::NhwcConv com.microsoft::NhwcFusedConv
        com.microsoft::ScaledSiLU
    """,
    "losses": "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss",
    "movement": """
        CenterCropPad Concat Constant ConstantOfShape EyeLike Gather GatherElements GatherND OneHot Pad Range
        ReverseSequence Shape Size Tile Trilu
    """,
    "narrow_cast": "Cast CastLike",
    "normalization": """
        BatchNormalization GroupNormalization InstanceNormalization LRN LayerNormalization LpNormalization
        MeanVarianceNormalization RMSNormalization SimplifiedLayerNormalization
        com.microsoft::SimplifiedLayerNormalization com.microsoft::SkipLayerNormalization
        com.microsoft::SkipSimplifiedLayerNormalization
    """,
    "optimizers": """
        ai.onnx.preview.training::Adagrad ai.onnx.preview.training::Adam ai.onnx.preview.training::Momentum
    """,
    "pool": "AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool com.microsoft::NhwcMaxPool",
    "qlinear": """
        com.microsoft::MulInteger com.microsoft::QLinearAdd com.microsoft::QLinearConcat
        com.microsoft::QLinearGlobalAveragePool com.microsoft::QLinearLeakyRelu com.microsoft::QLinearMul
        com.microsoft::QLinearReduceMean com.microsoft::QLinearSigmoid com.microsoft::QLinearSoftmax
        com.microsoft::QLinearWhere com.microsoft::ReduceSumInteger
    """,
    "quantization": """
        DequantizeLinear DynamicQuantizeLinear QuantizeLinear com.microsoft::DequantizeLinear
        com.microsoft::QuantizeLinear
    """,
    "quantized_embedding": "com.microsoft::QEmbedLayerNormalization",
    "quantized_pool": "com.microsoft::QLinearAveragePool",
    "randomness": "Bernoulli RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
    "reduction": """
        ArgMax ArgMin Hardmax LogSoftmax ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean
        ReduceMin ReduceProd ReduceSum ReduceSumSquare Softmax
    """,
    "resample": "Resize Upsample",
    "rotary": "RotaryEmbedding com.microsoft::RotaryEmbedding",
    "sampling": "AffineGrid DeformConv GridSample RoiAlign",
    "views": """
        Crop DepthToSpace Dropout Expand Flatten Reshape Slice SpaceToDepth Split Squeeze Transpose Unsqueeze
    """,
    "windows": "BlackmanWindow Col2Im HammingWindow HannWindow MelWeightMatrix",
}

SHARED = Lowerings("ranvier.codegen.definitions.lower", _OPERATORS)
lowers = SHARED.lowers
