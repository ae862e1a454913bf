"""Image classifiers: ResNet-50, MobileNetV2, MobileNetV3-large, EfficientNet-B0, ConvNeXt-T, all at 224."""

from __future__ import annotations

from bench.models.blocks import GAIN, Net

CLASSES = 1000


def resnet50() -> Net:
    """Version 1.5 (the stride in the 3×3 convolution), batch normalization left for the runtime to fold."""
    net = Net("resnet50", opset=17)

    def unit(x: str, inside: int, outside: int, kernel: int = 1, stride: int = 1, *, gain: float = 1.0) -> str:
        return net.batch_norm(net.conv(x, inside, outside, kernel, stride=stride, gain=gain, bias=False), outside)

    relu = GAIN["relu"]
    x = net.node("Relu", unit(_picture(net), 3, 64, 7, 2, gain=relu))
    x = net.max_pool(x, 3, stride=2, pad=1)
    channels = 64
    for number, (width, depth) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)]):
        for k in range(depth):
            with net.scope(f"layer{number + 1}.{k}"):
                stride = 2 if k == 0 and number else 1
                y = net.node("Relu", unit(x, channels, width, gain=relu))
                y = net.node("Relu", unit(y, width, width, 3, stride, gain=relu))
                # a small last factor keeps the sum of many blocks in the range of 16-bit floats
                y = unit(y, width, 4 * width, gain=0.3)
                beside = unit(x, channels, 4 * width, 1, stride) if k == 0 else x
                x = net.node("Relu", net.add(y, beside))
                channels = 4 * width
    return _classified(net, net.node("GlobalAveragePool", x), channels)


def mobilenet_v2() -> Net:
    """As PyTorch exports it: batch normalization folded, ReLU6 as Clip."""
    net = Net("mobilenet_v2", opset=13)
    relu = GAIN["relu"]
    x = net.clip(net.conv(_picture(net), 3, 32, 3, stride=2, gain=relu), 0.0, 6.0)
    channels = 32
    # expansion, channels, repeats, stride of the first
    stages = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    for number, (factor, outside, repeats, first) in enumerate(stages):
        for k in range(repeats):
            with net.scope(f"features.{number}.{k}"):
                stride, wide = (first if k == 0 else 1), channels * factor
                y = x if factor == 1 else net.clip(net.conv(x, channels, wide, gain=relu), 0.0, 6.0)
                y = net.clip(net.conv(y, wide, wide, 3, stride=stride, groups=wide, gain=relu), 0.0, 6.0)
                y = net.conv(y, wide, outside)
                x = net.add(x, y) if stride == 1 and channels == outside else y
                channels = outside
    x = net.clip(net.conv(x, channels, 1280, gain=relu), 0.0, 6.0)
    return _classified(net, net.node("GlobalAveragePool", x), 1280)


def mobilenet_v3_large() -> Net:
    """As PyTorch exports it at opset 14 and later: HardSwish and HardSigmoid as operators."""
    net = Net("mobilenet_v3_large", opset=17)
    # kernel, expanded, channels, squeeze-and-excite, hard swish, stride
    rows = [
        (3, 16, 16, False, False, 1),
        (3, 64, 24, False, False, 2),
        (3, 72, 24, False, False, 1),
        (5, 72, 40, True, False, 2),
        (5, 120, 40, True, False, 1),
        (5, 120, 40, True, False, 1),
        (3, 240, 80, False, True, 2),
        (3, 200, 80, False, True, 1),
        (3, 184, 80, False, True, 1),
        (3, 184, 80, False, True, 1),
        (3, 480, 112, True, True, 1),
        (3, 672, 112, True, True, 1),
        (5, 672, 160, True, True, 2),
        (5, 960, 160, True, True, 1),
        (5, 960, 160, True, True, 1),
    ]
    x = net.node("HardSwish", net.conv(_picture(net), 3, 16, 3, stride=2, gain=GAIN["hardswish"]))
    channels = 16
    for k, (kernel, wide, outside, squeeze, swish, stride) in enumerate(rows):
        op, gain = ("HardSwish", GAIN["hardswish"]) if swish else ("Relu", GAIN["relu"])
        with net.scope(f"features.{k + 1}"):
            y = x if wide == channels else net.node(op, net.conv(x, channels, wide, gain=gain))
            y = net.node(op, net.conv(y, wide, wide, kernel, stride=stride, groups=wide, gain=gain))
            if squeeze:
                inside = max(8, (wide // 4 + 4) // 8 * 8)
                pooled = net.node("GlobalAveragePool", y)
                middle = net.node("Relu", net.conv(pooled, wide, inside))
                scale = net.node("HardSigmoid", net.conv(middle, inside, wide), alpha=1 / 6)
                y = net.mul(scale, y)
            y = net.conv(y, wide, outside, gain=1.5 if squeeze else 1.0)
            x = net.add(x, y) if stride == 1 and channels == outside else y
            channels = outside
    x = net.node("HardSwish", net.conv(x, channels, 960, gain=GAIN["hardswish"]))
    flat = net.node("Flatten", net.node("GlobalAveragePool", x), axis=1)
    wide_features = net.node("HardSwish", net.gemm(flat, 960, 1280, gain=GAIN["hardswish"]))
    net.output(net.gemm(wide_features, 1280, CLASSES), "logits", ["batch", CLASSES])
    return net


def efficientnet_b0() -> Net:
    """As converters from TensorFlow write it: batch normalizations left in place, SiLU as Sigmoid and Mul."""
    net = Net("efficientnet_b0", opset=13)
    silu = GAIN["silu"]

    def unit(x: str, inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1) -> str:
        y = net.conv(x, inside, outside, kernel, stride=stride, groups=groups, gain=silu, bias=False)
        return net.silu(net.batch_norm(y, outside))

    x = unit(_picture(net), 3, 32, 3, stride=2)
    channels = 32
    # expansion, kernel, channels, repeats, stride of the first
    stages = [
        (1, 3, 16, 1, 1),
        (6, 3, 24, 2, 2),
        (6, 5, 40, 2, 2),
        (6, 3, 80, 3, 2),
        (6, 5, 112, 3, 1),
        (6, 5, 192, 4, 2),
        (6, 3, 320, 1, 1),
    ]
    for number, (factor, kernel, outside, repeats, first) in enumerate(stages):
        for k in range(repeats):
            with net.scope(f"blocks.{number}.{k}"):
                stride, wide = (first if k == 0 else 1), channels * factor
                y = x if factor == 1 else unit(x, channels, wide, 1)
                y = unit(y, wide, wide, kernel, stride, groups=wide)
                inside = channels // 4
                pooled = net.node("GlobalAveragePool", y)
                middle = net.silu(net.conv(pooled, wide, inside))
                y = net.mul(y, net.node("Sigmoid", net.conv(middle, inside, wide)))
                y = net.batch_norm(net.conv(y, wide, outside, gain=1.5, bias=False), outside)
                x = net.add(y, x) if stride == 1 and channels == outside else y
                channels = outside
    x = unit(x, channels, 1280, 1)
    return _classified(net, net.node("GlobalAveragePool", x), 1280)


def convnext_tiny() -> Net:
    """As exported before opset 17: layer normalization in single steps, channels moved last around it and back."""
    net = Net("convnext_tiny", opset=16)

    def norm_first(x: str, width: int) -> str:
        last = net.layer_norm_chain(net.transpose(x, 0, 2, 3, 1), width, epsilon=1e-6)
        return net.transpose(last, 0, 3, 1, 2)

    x = norm_first(net.conv(_picture(net), 3, 96, 4, stride=4, pad=0), 96)
    channels = 96
    for number, (width, depth) in enumerate([(96, 3), (192, 3), (384, 9), (768, 3)]):
        if number:
            with net.scope(f"downsample.{number}"):
                x = net.conv(norm_first(x, channels), channels, width, 2, stride=2, pad=0)
                channels = width
        for k in range(depth):
            with net.scope(f"stages.{number}.{k}"):
                y = net.transpose(net.conv(x, width, width, 7, groups=width), 0, 2, 3, 1)
                y = net.layer_norm_chain(y, width, epsilon=1e-6)
                y = net.linear(net.gelu(net.linear(y, width, 4 * width, gain=GAIN["gelu"])), 4 * width, width)
                y = net.transpose(net.mul(y, net.around(0.5, width)), 0, 3, 1, 2)
                x = net.add(x, y)
    pooled = net.node("Flatten", net.node("GlobalAveragePool", x), axis=1)
    net.output(net.gemm(net.layer_norm_chain(pooled, 768), 768, CLASSES), "logits", ["batch", CLASSES])
    return net


def _picture(net: Net) -> str:
    return net.input("input", ["batch", 3, 224, 224])


def _classified(net: Net, pooled: str, features: int) -> Net:
    flat = net.node("Flatten", pooled, axis=1)
    net.output(net.gemm(flat, features, CLASSES), "logits", ["batch", CLASSES])
    return net
