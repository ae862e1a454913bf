"""Operators by family, and a colour for each: what a picture of a graph is painted with."""

from __future__ import annotations

from ranvier.graph.ir import Node
from ranvier.records import dataclass


@dataclass(frozen=True)
class Family:
    """A kind of operator as a reader thinks of it. White text is readable on ``colour``."""

    name: str
    colour: str


CONTRACTION = Family("matrix and convolution", "#2f5fa5")
ACTIVATION = Family("activation", "#b4433c")
NORMALIZATION = Family("normalization", "#3b7d4e")
POOLING = Family("pooling and reduction", "#6d4fa3")
ELEMENTWISE = Family("elementwise", "#4d5b6e")
MOVEMENT = Family("shape and movement", "#8a6a34")
INDEXING = Family("indexing and selection", "#10726b")
SEQUENCE = Family("recurrent and attention", "#9c3a84")
QUANTIZATION = Family("quantization", "#b3560c")
CONTROL = Family("control flow", "#222c3c")
OTHER = Family("other", "#6a7280")

_MEMBERS: dict[Family, str] = {
    CONTRACTION: """Conv ConvTranspose MatMul Gemm Einsum DeformConv FusedConv FusedMatMul FusedGemm MatMulNBits
        LinearClassifier LinearRegressor SVMClassifier SVMRegressor Det DFT STFT CausalConvWithState""",
    ACTIVATION: """Relu LeakyRelu PRelu Elu Celu Selu ThresholdedRelu Sigmoid HardSigmoid HardSwish Swish Mish Tanh
        Softplus Softsign Gelu FastGelu BiasGelu QuickGelu Softmax LogSoftmax Hardmax Clip Shrink Erf""",
    NORMALIZATION: """BatchNormalization InstanceNormalization LayerNormalization GroupNormalization LRN
        RMSNormalization LpNormalization MeanVarianceNormalization SkipLayerNormalization
        SimplifiedLayerNormalization SkipSimplifiedLayerNormalization EmbedLayerNormalization GroupNorm Normalizer
        Scaler Dropout""",
    POOLING: """MaxPool AveragePool GlobalMaxPool GlobalAveragePool LpPool GlobalLpPool MaxUnpool MaxRoiPool RoiAlign
        ArgMax ArgMin CumSum CumProd""",
    MOVEMENT: """Reshape Flatten Squeeze Unsqueeze Transpose Concat Split SplitToSequence Expand Tile Pad Slice
        DepthToSpace SpaceToDepth Resize Upsample Identity Cast CastLike Shape Size Constant ConstantOfShape Range
        EyeLike GridSample AffineGrid CenterCropPad Col2Im ReverseSequence""",
    INDEXING: """Gather GatherElements GatherND Scatter ScatterElements ScatterND TensorScatter Where NonZero TopK
        Unique OneHot Compress Trilu NonMaxSuppression ArrayFeatureExtractor LabelEncoder TreeEnsemble
        TreeEnsembleClassifier TreeEnsembleRegressor""",
    SEQUENCE: """LSTM GRU RNN Attention MultiHeadAttention GroupQueryAttention QAttention DynamicQuantizeLSTM
        RotaryEmbedding LinearAttention FlexAttention""",
    QUANTIZATION: """QuantizeLinear DequantizeLinear DynamicQuantizeLinear""",
    CONTROL: """If Loop Scan SequenceMap""",
    ELEMENTWISE: """Add Sub Mul Div Pow Sqrt Exp Log Neg Abs Reciprocal Min Max Mean Sum Floor Ceil Round Sign Mod Sin
        Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh And Or Xor Not Equal Greater GreaterOrEqual Less LessOrEqual
        IsNaN IsInf BitShift BitwiseAnd BitwiseOr BitwiseXor BitwiseNot Binarizer""",
}
_BY_OPERATOR = {name: family for family, names in _MEMBERS.items() for name in names.split()}


def family_of(node: Node) -> Family:
    """The family of a node's operator; a body makes it control flow, whatever it is called."""
    if node.has_subgraphs:
        return CONTROL
    found = _BY_OPERATOR.get(node.op)
    if found is not None:
        return found
    if node.op.startswith("Reduce"):
        return POOLING
    if node.op.startswith("Sequence"):
        return MOVEMENT
    return QUANTIZATION if node.op.startswith(("QLinear", "Quantize", "Dequantize")) or "Integer" in node.op else OTHER
