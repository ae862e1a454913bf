"""Operators that have no gradient, each with the reason, which is what the error says."""

from __future__ import annotations

MICROSOFT, CLASSICAL = "com.microsoft", "ai.onnx.ml"

_DISCRETE = "its results are whole numbers, truth values, text or maps"
_INDEPENDENT = "its results do not depend on the values of numbers"
_JUMPS = "it is constant between jumps"
_CODES = (
    "it computes with codes and rounds; train the model in floating point, with QuantizeLinear and DequantizeLinear "
    "where it shall learn to be rounded"
)
_MERGED = "equal numbers become one, so that its size jumps with their values"
_BITS = "it reads the bits of numbers as others"
_OPTIMIZER = "it is the step of an optimizer, which is taken with gradients and has none"
_DECODER = "it is one step of a decoder, over a cache that is written in place"

_WITHOUT: dict[tuple[str, str], str] = {
    (domain, name): reason
    for domain, reason, names in (
        ("", _DISCRETE, """And ArgMax ArgMin BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor ConvInteger Equal
            Greater GreaterOrEqual ImageDecoder Less LessOrEqual MatMulInteger Multinomial NonMaxSuppression NonZero
            Not OptionalHasElement Or RegexFullMatch SequenceLength StringConcat StringNormalizer StringSplit Xor"""),
        ("", _INDEPENDENT, """BlackmanWindow Constant ConstantOfShape EyeLike HammingWindow HannWindow RandomNormal
            RandomNormalLike RandomUniform RandomUniformLike SequenceEmpty TfIdfVectorizer"""),
        ("", _JUMPS, "Hardmax MelWeightMatrix"),
        ("", _MERGED, "Unique"),
        ("", _BITS, "BitCast"),
        ("", _CODES, "QLinearConv QLinearMatMul"),
        (CLASSICAL, _DISCRETE, "CastMap CategoryMapper DictVectorizer LabelEncoder ZipMap"),
        (CLASSICAL, _JUMPS, "Binarizer OneHotEncoder TreeEnsemble TreeEnsembleClassifier TreeEnsembleRegressor"),
        ("ai.onnx.preview.training", _OPTIMIZER, "Adagrad Adam Momentum"),
        (MICROSOFT, _DISCRETE, "DynamicTimeWarping IsAllFinite MatMulInteger16 MulInteger ReduceSumInteger"),
        (MICROSOFT, _MERGED, "Unique"),
        (MICROSOFT, _DECODER, "DecoderMaskedMultiHeadAttention"),
        (MICROSOFT, _CODES, """DynamicQuantizeLSTM DynamicQuantizeMatMul MatMulIntegerToFloat QAttention
            QEmbedLayerNormalization QGemm QLinearAdd QLinearAveragePool QLinearConcat QLinearConv
            QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearReduceMean QLinearSigmoid QLinearSoftmax
            QLinearWhere"""),
    )
    for name in names.split()
}  # fmt: skip


def reason_against(domain: str, name: str) -> str | None:
    """Why an operator has no gradient; None where it has one, or where nobody has said why it has none."""
    return _WITHOUT.get((domain, name))


def without_gradient() -> list[tuple[str, str, str]]:
    """All of them: domain, name and reason."""
    return sorted((domain, name, reason) for (domain, name), reason in _WITHOUT.items())
