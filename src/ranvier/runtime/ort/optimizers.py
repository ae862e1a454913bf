"""ONNX Runtime's optimizers, by the names under which scripts switch them off."""

from __future__ import annotations

from collections.abc import Sequence

from ranvier.logs import logger

# what does here the work of theirs
_PASSES = {
    "AttentionFusion": "fuse_attention",
    "BiasGeluFusion": "fuse_activations",
    "CastChainElimination": "cancel",
    "CastElimination": "cancel",
    "CommonSubexpressionElimination": "common_subexpressions",
    "ConstantFolding": "fold_constants",
    "ConvAddFusion": "fold_affine",
    "ConvBNFusion": "fold_affine",
    "ConvMulFusion": "fold_affine",
    "EliminateDropout": "cancel",
    "EliminateIdentity": "cancel",
    "EliminateSlice": "cancel",
    "ExpandElimination": "cancel",
    "FastGeluFusion": "fuse_activations",
    "GeluFusion": "fuse_activations",
    "GroupQueryAttentionFusion": "fuse_attention",
    "LayerNormFusion": "fuse_normalizations",
    "MatMul_BatchNormalization_Fusion": "fold_affine",
    "NoopElimination": "cancel",
    "QDQSelectorActionTransformer": "fuse_quantized",
    "QuickGeluFusion": "fuse_activations",
    "SimplifiedLayerNormFusion": "fuse_normalizations",
    "SkipLayerNormFusion": "fuse_normalizations",
    "UnsqueezeElimination": "cancel",
}
# what is not done here, or is part of making code
_IDLE = {
    *("BiasDropoutFusion", "BiasSkipLayerNormFusion", "BiasSoftmaxFusion", "ClipQuantRewrite", "ConstantSharing"),
    *("ConvActivationFusion", "ConvAddActivationFusion", "DivMulFusion", "DoubleQDQPairsRemover"),
    *("DQMatMulNBitsFusion", "DynamicQuantizeMatMulFusion", "EmbedLayerNormFusion", "GatherSliceToSplitFusion"),
    *("GatherToSliceFusion", "GeluApproximation", "GemmActivationFusion", "GemmSumFusion", "GemmTransposeFusion"),
    *("LabelEncoderFusion", "MatMulActivationFusion", "MatMulAddFusion", "MatMulIntegerToFloatFusion"),
    *("MatMulNBitsFusion", "MatMulScaleFusion", "MatmulTransposeFusion", "NchwcTransformer", "NhwcTransformer"),
    *("NotWhereFusion", "Pad_Fusion", "PreShapeNodeElimination", "QDQFinalCleanupTransformer"),
    *("QDQPropagationTransformer", "QDQS8ToU8Transformer", "ReluQuantRewrite", "RemoveDuplicateCastTransformer"),
    *("ReshapeFusion", "SliceConcatToSpaceToDepthFusion", "TransposeOptimizer"),
}


def passes_of(optimizers: Sequence[str]) -> tuple[str, ...]:
    """The passes that are meant; a name that ONNX Runtime does not have either stays, and is refused as a pass."""
    found: list[str] = []
    for name in optimizers:
        if name in _IDLE:
            logger.info("disabled_optimizers: %r changes nothing here", name)
        else:
            found.append(_PASSES.get(name, name))
    return tuple(dict.fromkeys(found))


__all__ = ["passes_of"]
